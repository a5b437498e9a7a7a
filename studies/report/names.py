"""Display names and colours of mechanisms, splits and settings, for all tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

from probes.plots import COLOURS

KNOWN = {
    "softmax": ("softmax attention", "#4477aa"),
    "linear": ("linear attention", "#e69f00"),
    "hyla": ("HYLA", "#cc3311"),
    "linear_relu": ("HYLA without RMSHead", "#ee6677"),
    "rms_head_linear": ("HYLA without nonlinearity", "#882255"),
    "linear_linear": ("HYLA without either", "#999933"),
    "softmax_relu": ("HYLA with softmax", "#332288"),
    "rms_head": ("linear attention, RMSHead", "#117733"),
    "coda": ("CoDA", "#66ccee"),
    "universal": ("universal transformer", "#332288"),
    "adaptive_universal": ("adaptive universal transformer", "#117733"),
    "multi_head": ("multi-head", "#4477aa"),
    "multi_head_pairs": ("a head for each pair", "#e69f00"),
    "compositional": ("compositional", "#332288"),
    "transformer_xl": ("Transformer-XL", "#117733"),
    "ndr": ("NDR", "#cc3311"),
    "ndr_undirected": ("NDR, no direction", "#aa3377"),
    "geometric": ("geometric, no gate", "#ee6677"),
    "relative_gate": ("relative, gate", "#ddcc77"),
    "relative_own_gate": ("relative, gate by own state", "#999933"),
    "relative_late_gate": ("relative, gate after attention", "#88ccee"),
    "abs_rel_gate": ("abs/rel, gate", "#e69f00"),
    "relative": ("relative", "#66ccee"),
    "transformer": ("transformer", "#4477aa"),
    "albert": ("ALBERT", "#0077bb"),
    "act": ("transformer, halting", "#117733"),
    "lstm": ("LSTM", "#000000"),
    "bilstm": ("BiLSTM", "#999999"),
    "dnc": ("DNC", "#882255"),
    "structural_oracle": ("structural oracle", "#117733"),
    "cross_attention": ("cross-attention", "#4477aa"),
    "concatenation": ("concatenation", "#882255"),
    "encoder": ("encoder", "#e69f00"),
    "monolithic": ("monolithic", "#999999"),
    "id": ("in distribution", "#4477aa"),
    "ood": ("out of distribution", "#cc3311"),
    "id_unpermuted": ("in distribution, unpermuted", "#4477aa"),
    "ood_unpermuted": ("out of distribution, unpermuted", "#cc3311"),
    "pooled": ("all layers", None),
    "collapse_attainable": ("collapse over the attainable", None),
    "pca": ("PCA", None),
    "tsne": ("t-SNE", None),
    "train_step": ("training step", None),
    "seen": ("tokens seen", None),
}
"""Display names and colours of mechanisms, splits and dims."""

SETTINGS = {
    "name": {
        "snli": "SNLI",
        "mnli": "MNLI",
        "scitail": "SciTail",
        "dnli": "Dialogue NLI",
        "trecqa": "TrecQA",
        "wikiqa": "WikiQA",
        "ubuntu": "Ubuntu",
        "imdb": "IMDb",
        "sst2": "SST-2",
    },
    "alignment": {"heads": "", "networks": "single"},
    "affinity": {"tanh": ""} | {f: f"{f}(E)" for f in ("sigmoid", "arctan", "algebraic")},
    "gate": {"sigmoid": ""} | {f: f"{f}(N)" for f in ("tanh", "arctan", "algebraic")},
    "affinity_centring": {"none": "", "row": "E by row", "matrix": "E by matrix"},
    "gate_centring": {"none": "", "row": "N by row", "matrix": "N by matrix"},
    "doubled": {"0": "", "1": "doubled gate"},
    "alpha": {"1": ""},
    "beta": {"1": ""},
    "scaled": {"0": "not scaled", "1": ""},
    "projection": {"linear": "", "two_layers": "F of two layers"},
    "objective": {"sampled": ""},
    "n_experts": {"1": "", "4": "4 experts"},
    "n_retrievals": {str(n): f"R={n}" for n in range(1, 9)},
    "scorer": {"dot": "", "mlp": "linear scorer"},
    "trained_on": {"familiar": "", "all": "trained on all"},
    "selection_bottleneck": {"0": "", "1": "selection bottleneck"},
    "functional_bottleneck": {
        "oracle": "",
        "attention": "attention to operands",
        "none": "no functional bottleneck",
    },
}
"""Display names of the values of settings; "" for a default that needs no mention."""


def name_of(key: object) -> str:
    """The display name of a key; without an entry in `KNOWN`, the key with spaces."""
    text = str(key)
    return KNOWN[text][0] if text in KNOWN else text.replace("_", " ")


def setting_name(setting: str, value: object) -> str:
    """The display name of a setting's value; "" if it is None or needs no mention."""
    if value is None:
        return ""
    text = str(value) if isinstance(value, str) else f"{value:g}"
    default = name_of(value) if isinstance(value, str) else f"{setting}={text}"
    return SETTINGS.get(setting, {}).get(text, default)


def setting_names(values: Mapping[str, object]) -> list[str]:
    """The display names of values of settings, without those that need no mention."""
    names = (setting_name(*value) for value in values.items())
    return [name for name in names if name]


def colours_of(keys: Sequence[object]) -> list[str]:
    """Colours for the keys of one plot, different from one another as far as possible.

    The first key with a fixed colour in `KNOWN` gets it; all others get unused ones of `COLOURS`.
    """
    fixed = [KNOWN.get(str(key), ("", None))[1] for key in keys]
    unused = cycle([colour for colour in COLOURS if colour not in fixed] or COLOURS)
    is_first = [colour not in fixed[:number] for number, colour in enumerate(fixed)]
    return [
        colour if colour and first else next(unused)
        for colour, first in zip(fixed, is_first, strict=True)
    ]
