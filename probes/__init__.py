"""Probes: labelled arrays in, labelled arrays out.

`capture` streams activations (reduced inside the hook) beside the ground truth of a task;
`decode`, `decode_continuous` and `decode_each` ask what is linearly readable from them, `project`
shows them in the plane (`draw_projection`), and `interchange` asks whether the model uses them
(`draw_interchange`). `latent_code`, `interchange_codes` and, under several conditions,
`interchange_pairs` do so for attention's latent code.

`capture_control_flow` keeps what columns do at every step, `extract_control_flow` makes graphs of
it (`match_control_flow` those of a control) and `draw_control_flow` pictures of these;
`score_control_flow` compares them with the true dataflow, and `cut` asks whether they are what
computes. `examine_control_flow` does all of it.

`score_specialization` asks whether each module of a router serves one operation; `search_paths`
and `score_paths` ask which path through the modules would have been best, and `adapt_paths` whether
a few labelled examples find it. `measure_specialization` and `measure_paths` are the same of a
model in groups of examples; `draw_specialization` and `ordered_activation` make pictures.

`score_pairing` asks which retrieval serves which search (`measure_pairing` of a model,
`draw_pairing` shows it), and `force_pairing` whether the right pairing would have mended the
answer; `summarise_value_scores`, where nobody knows the pairing, whether each search keeps to a
retrieval and whether groups of examples differ in theirs (`measure_value_scores` of a model,
`draw_value_scores` shows it).

`loss_by_context` asks what a model of a text gains from the tokens that it has seen
(`measure_loss_by_context` of a model).

`score_signedness` asks which tokens attention adds, subtracts or deletes, `score_saturation` how
much of what decides it lies where a function is flat; `measure_signedness` and
`measure_saturation` are the same of models at all places where they attend (`examine_places`).

`mean_by_labels` averages a score over what has the same ground truth.

`bootstrap_ratio`, `bootstrap` and `over_seeds` compute the intervals of all of these and of
studies, `interval_variables` stores them. `paired_test`, `pairs_needed` and `holm` test differences
between models; `measure_costs` counts parameters, operations and blocks.

Names are imported on first use (PEP 562), so that `import probes` costs nothing.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
