"""The control flow of a model with gates over steps, as a graph: drawn, scored, cut."""
