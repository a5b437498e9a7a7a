"""One table of names and colours for all tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

KNOWN = {
    "softmax": ("softmax attention", "#4477aa"),
    "linear": ("linear attention", "#228833"),
    "hyla": ("HYLA", "#cc3311"),
    "linear_relu": ("HYLA without RMSHead", "#ee8866"),
    "rms_head_linear": ("HYLA without nonlinearity", "#aa4499"),
    "coda": ("CoDA", "#997700"),
    "multi_head": ("multi-head", "#4477aa"),
    "multi_head_pairs": ("a head for each pair", "#66aadd"),
    "compositional": ("compositional", "#332288"),
    "transformer_xl": ("Transformer-XL", "#009988"),
    "ndr": ("NDR", "#cc3311"),
    "geometric": ("geometric, no gate", "#ee8866"),
    "relative_gate": ("relative, gate", "#228833"),
    "abs_rel_gate": ("abs/rel, gate", "#997700"),
    "relative": ("relative", "#66aadd"),
    "transformer": ("transformer", "#4477aa"),
    "lstm": ("LSTM", "#555555"),
    "bilstm": ("BiLSTM", "#888888"),
    "dnc": ("DNC", "#aa4499"),
    "structural_oracle": ("structural oracle", "#117733"),
    "cross_attention": ("cross-attention", "#4477aa"),
    "concatenation": ("concatenation", "#aa3377"),
    "encoder": ("encoder", "#dd8822"),
    "monolithic": ("monolithic", "#555555"),
    "id": ("in distribution", "#4477aa"),
    "ood": ("out of distribution", "#cc3311"),
    "pooled": ("all layers", None),
    "collapse_attainable": ("collapse over the attainable", None),
    "pca": ("PCA", None),
    "tsne": ("t-SNE", None),
    "train_step": ("training step", None),
}
"""What mechanisms, splits and dims are called where people read them, and their colours."""

SETTINGS = {
    "alignment": {"heads": "", "networks": "single"},
    "affinity": {"tanh": ""} | {f: f"{f}(E)" for f in ("sigmoid", "arctan", "algebraic")},
    "gate": {"sigmoid": ""} | {f: f"{f}(N)" for f in ("tanh", "arctan", "algebraic")},
    "affinity_centring": {"none": "", "row": "E by row", "matrix": "E by matrix"},
    "gate_centring": {"none": "", "row": "N by row", "matrix": "N by matrix"},
    "doubled": {"0": "", "1": "doubled gate"},
    "objective": {"sampled": ""},
    "selection_bottleneck": {"0": "", "1": "selection bottleneck"},
    "functional_bottleneck": {
        "oracle": "",
        "attention": "attention to operands",
        "none": "no functional bottleneck",
    },
}
"""What values of settings are called; "" for one that goes without saying."""

OTHERS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888", "#999933")
"""Colours of what has none of its own, in turn."""

CONTROL = "#777777"
"""The colour of controls."""

MARKERS = ("o", "s", "^", "D", "X", "v", "P", "*", "<", ">")
"""Markers of conditions, in turn."""


def name_of(key: object) -> str:
    """What something is called where people read it: its name, or its key with spaces."""
    text = str(key)
    return KNOWN[text][0] if text in KNOWN else text.replace("_", " ")


def setting_name(setting: str, value: object) -> str:
    """What a setting's value is called; "" if it does not apply or goes without saying."""
    if value is None:
        return ""
    text = str(value) if isinstance(value, str) else f"{value:g}"
    usual = name_of(value) if isinstance(value, str) else f"{setting}={text}"
    return SETTINGS.get(setting, {}).get(text, usual)


def colours_of(keys: Sequence[object]) -> list[str]:
    """Colours for one plot: mechanisms and splits have their own, others what is left.

    They differ for as long as there are enough.
    """
    own = [KNOWN.get(str(key), ("", None))[1] for key in keys]
    left = cycle([colour for colour in OTHERS if colour not in own] or OTHERS)
    first = [colour not in own[:number] for number, colour in enumerate(own)]
    return [c if c and new else next(left) for c, new in zip(own, first, strict=True)]
