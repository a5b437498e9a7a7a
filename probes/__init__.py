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

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probes.adapting import adapt_paths
    from probes.attention_places import (
        AttentionPlace,
        capture_places,
        examine_places,
        score_places,
    )
    from probes.capturing import Batch, Quantity, capture
    from probes.context import loss_by_context, measure_loss_by_context
    from probes.control_flow_capturing import capture_control_flow
    from probes.control_flow_cutting import cut
    from probes.control_flow_examination import examine_control_flow
    from probes.control_flow_export import (
        to_networkx,
        write_control_flow,
        write_graphml,
        write_node_link,
    )
    from probes.control_flow_graphs import collapse_columns, extract_control_flow
    from probes.control_flow_matching import match_control_flow
    from probes.control_flow_picture import (
        DrawnExample,
        draw_attention,
        draw_control_flow,
        plot_attention,
        plot_control_flow,
    )
    from probes.control_flow_scores import score_control_flow
    from probes.costs import count_blocks, count_operations, count_parameters, measure_costs
    from probes.decoding import decode
    from probes.decoding_continuous import decode_continuous, decode_each
    from probes.forcing import force_pairing
    from probes.grouping import mean_by_labels
    from probes.hooking import HookedModel, resolve_hooks
    from probes.interchange_picture import draw_interchange
    from probes.interchanging import interchange
    from probes.intervals import (
        Interval,
        bootstrap,
        bootstrap_ratio,
        interval_variables,
        over_seeds,
    )
    from probes.latent_codes import interchange_codes, interchange_pairs, latent_code
    from probes.oracle_paths import PathModel
    from probes.oracle_scores import score_paths
    from probes.oracle_search import search_paths
    from probes.paired_tests import holm, paired_test, pairs_needed
    from probes.pairing import score_pairing
    from probes.pairing_capture import measure_pairing
    from probes.pairing_picture import draw_pairing
    from probes.projecting import project
    from probes.projection_picture import draw_projection
    from probes.routing_capture import measure_paths, measure_specialization
    from probes.saturation import score_saturation
    from probes.signedness import relative_weights, score_signedness, strongest_head
    from probes.signedness_capture import measure_saturation, measure_signedness
    from probes.signedness_picture import draw_distribution, draw_matrices, draw_numbers
    from probes.specialization import score_specialization
    from probes.specialization_picture import draw_specialization, ordered_activation
    from probes.value_scores import measure_value_scores, summarise_value_scores
    from probes.value_scores_picture import draw_value_scores

_HOME = {
    "AttentionPlace": "probes.attention_places",
    "Batch": "probes.capturing",
    "DrawnExample": "probes.control_flow_picture",
    "HookedModel": "probes.hooking",
    "Interval": "probes.intervals",
    "PathModel": "probes.oracle_paths",
    "Quantity": "probes.capturing",
    "adapt_paths": "probes.adapting",
    "bootstrap": "probes.intervals",
    "bootstrap_ratio": "probes.intervals",
    "capture": "probes.capturing",
    "capture_control_flow": "probes.control_flow_capturing",
    "capture_places": "probes.attention_places",
    "collapse_columns": "probes.control_flow_graphs",
    "count_blocks": "probes.costs",
    "count_operations": "probes.costs",
    "count_parameters": "probes.costs",
    "cut": "probes.control_flow_cutting",
    "decode": "probes.decoding",
    "decode_continuous": "probes.decoding_continuous",
    "decode_each": "probes.decoding_continuous",
    "draw_attention": "probes.control_flow_picture",
    "draw_control_flow": "probes.control_flow_picture",
    "draw_distribution": "probes.signedness_picture",
    "draw_interchange": "probes.interchange_picture",
    "draw_matrices": "probes.signedness_picture",
    "draw_numbers": "probes.signedness_picture",
    "draw_pairing": "probes.pairing_picture",
    "draw_projection": "probes.projection_picture",
    "draw_specialization": "probes.specialization_picture",
    "draw_value_scores": "probes.value_scores_picture",
    "examine_control_flow": "probes.control_flow_examination",
    "examine_places": "probes.attention_places",
    "extract_control_flow": "probes.control_flow_graphs",
    "force_pairing": "probes.forcing",
    "holm": "probes.paired_tests",
    "interchange": "probes.interchanging",
    "interchange_codes": "probes.latent_codes",
    "interchange_pairs": "probes.latent_codes",
    "interval_variables": "probes.intervals",
    "latent_code": "probes.latent_codes",
    "loss_by_context": "probes.context",
    "match_control_flow": "probes.control_flow_matching",
    "mean_by_labels": "probes.grouping",
    "measure_costs": "probes.costs",
    "measure_loss_by_context": "probes.context",
    "measure_pairing": "probes.pairing_capture",
    "measure_paths": "probes.routing_capture",
    "measure_saturation": "probes.signedness_capture",
    "measure_signedness": "probes.signedness_capture",
    "measure_specialization": "probes.routing_capture",
    "measure_value_scores": "probes.value_scores",
    "ordered_activation": "probes.specialization_picture",
    "over_seeds": "probes.intervals",
    "paired_test": "probes.paired_tests",
    "pairs_needed": "probes.paired_tests",
    "plot_attention": "probes.control_flow_picture",
    "plot_control_flow": "probes.control_flow_picture",
    "project": "probes.projecting",
    "relative_weights": "probes.signedness",
    "resolve_hooks": "probes.hooking",
    "score_control_flow": "probes.control_flow_scores",
    "score_pairing": "probes.pairing",
    "score_paths": "probes.oracle_scores",
    "score_places": "probes.attention_places",
    "score_saturation": "probes.saturation",
    "score_signedness": "probes.signedness",
    "score_specialization": "probes.specialization",
    "search_paths": "probes.oracle_search",
    "strongest_head": "probes.signedness",
    "summarise_value_scores": "probes.value_scores",
    "to_networkx": "probes.control_flow_export",
    "write_control_flow": "probes.control_flow_export",
    "write_graphml": "probes.control_flow_export",
    "write_node_link": "probes.control_flow_export",
}

__all__ = [
    "AttentionPlace",
    "Batch",
    "DrawnExample",
    "HookedModel",
    "Interval",
    "PathModel",
    "Quantity",
    "adapt_paths",
    "bootstrap",
    "bootstrap_ratio",
    "capture",
    "capture_control_flow",
    "capture_places",
    "collapse_columns",
    "count_blocks",
    "count_operations",
    "count_parameters",
    "cut",
    "decode",
    "decode_continuous",
    "decode_each",
    "draw_attention",
    "draw_control_flow",
    "draw_distribution",
    "draw_interchange",
    "draw_matrices",
    "draw_numbers",
    "draw_pairing",
    "draw_projection",
    "draw_specialization",
    "draw_value_scores",
    "examine_control_flow",
    "examine_places",
    "extract_control_flow",
    "force_pairing",
    "holm",
    "interchange",
    "interchange_codes",
    "interchange_pairs",
    "interval_variables",
    "latent_code",
    "loss_by_context",
    "match_control_flow",
    "mean_by_labels",
    "measure_costs",
    "measure_loss_by_context",
    "measure_pairing",
    "measure_paths",
    "measure_saturation",
    "measure_signedness",
    "measure_specialization",
    "measure_value_scores",
    "ordered_activation",
    "over_seeds",
    "paired_test",
    "pairs_needed",
    "plot_attention",
    "plot_control_flow",
    "project",
    "relative_weights",
    "resolve_hooks",
    "score_control_flow",
    "score_pairing",
    "score_paths",
    "score_places",
    "score_saturation",
    "score_signedness",
    "score_specialization",
    "search_paths",
    "strongest_head",
    "summarise_value_scores",
    "to_networkx",
    "write_control_flow",
    "write_graphml",
    "write_node_link",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # No module is named like what it exports: importing the module would shadow the function here.
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
