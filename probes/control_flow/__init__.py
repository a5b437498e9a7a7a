"""Control flow of models with gates over steps: graphs, scores, interventions and plots."""
