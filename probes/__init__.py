"""Probes: labelled arrays in, labelled arrays out.

- Capturing: `capture` streams activations, reduced inside the hook, with a task's ground truth;
  `hooked` makes any module a model with hooks; `masked_mean`, `last_token` and `span_mean` reduce.
  `examine_places` applies a score to the attention modules of several models.
- Decoding: `decode`, `decode_continuous` and `decode_each` fit linear probes with controls;
  `project` projects codes to two components, `compare_means` compares the mean codes of labels.
- Attention: `score_pointing` says whether heads point to the right one of several candidates.
- Interventions: `interchange` patches activations from other examples, `At` those of one step;
  `align` finds the subspaces (`Vector`) that hold the variables of a task, exchanged by `swap`
  (`Swaps`); `erase` removes a label; `attribute`, `patch_edges` and `measure_faithfulness` find
  circuits, beside random edges, and `label_patching` labels TransformerLens' patching;
  `latent_code`, `interchange_codes` and `interchange_pairs` (several conditions) are for the latent
  code of attention.
- Control flow: `capture_control_flow`, `extract_control_flow` (graphs), `match_control_flow` (a
  control), `score_control_flow` (against the true dataflow, beside null models) and `cut` (an
  intervention); `examine_control_flow` runs them all, `sweep_thresholds` varies thresholds.
  `score_heads` (which pairs a head joins), `score_reads` (neighbours, fixed places, blur) and
  `score_timing` (when operations are done) also take models without gates.
- Loops: `score_steps` (answers after each step), `score_states` (fixed points and cycles),
  `nudge_states` (sensitivity) and `score_halting` (steps taken against steps needed).
- Modular networks: `score_specialization` (modules and operations); `search_paths`, `score_paths`
  and `adapt_paths` (the best paths through the modules). `measure_specialization` and
  `measure_paths` run a model; `ordered_activation` sorts modules by their operations.
- Compositional attention: `score_pairing` (searches and retrievals), `force_pairing` (an
  intervention) and, without a known pairing, `summarise_value_scores`. `measure_pairing` and
  `measure_value_scores` run a model.
- Signed attention: `score_signedness` (added, subtracted and deleted tokens) and
  `score_saturation`; `measure_signedness` and `measure_saturation` run models.
- Language models: `loss_by_context`; `measure_loss_by_context` runs a model.
- Plots: `plots` draws each of these results on matplotlib axes, by one function.
- Statistics: `bootstrap`, `bootstrap_ratio` and `over_seeds` compute intervals,
  `interval_variables` stores them; `paired_test`, `pairs_needed` and `holm` test differences;
  `mean_by_labels` averages by label; `measure_costs` counts parameters, operations and blocks.

Names are imported on first use (PEP 562), so that `import probes` is fast.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
