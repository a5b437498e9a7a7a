"""One table of names and colours for all tables and figures."""

from __future__ import annotations

NAMES = {
    "softmax": "softmax attention",
    "linear": "linear attention",
    "hyla": "HYLA",
    "linear_relu": "HYLA without RMSHead",
    "rms_head_linear": "HYLA without nonlinearity",
    "coda": "CoDA",
    "multi_head": "multi-head",
    "multi_head_pairs": "a head for each pair",
    "compositional": "compositional",
    "transformer_xl": "Transformer-XL",
    "ndr": "NDR",
    "geometric": "geometric, no gate",
    "relative_gate": "relative, gate",
    "abs_rel_gate": "abs/rel, gate",
    "relative": "relative",
    "transformer": "transformer",
    "lstm": "LSTM",
    "bilstm": "BiLSTM",
    "dnc": "DNC",
    "structural_oracle": "structural oracle",
    "cross_attention": "cross-attention",
    "concatenation": "concatenation",
    "encoder": "encoder",
    "monolithic": "monolithic",
    "pooled": "all layers",
    "collapse_attainable": "collapse over the attainable",
    "id": "in distribution",
    "ood": "out of distribution",
    "pca": "PCA",
    "tsne": "t-SNE",
}
"""What mechanisms, splits and methods are called where people read them."""

SETTINGS = {
    "alignment=heads": "",
    "alignment=networks": "single",
    "affinity=tanh": "",
    "affinity=sigmoid": "sigmoid(E)",
    "affinity=arctan": "arctan(E)",
    "affinity=algebraic": "algebraic(E)",
    "gate=sigmoid": "",
    "gate=tanh": "tanh(N)",
    "gate=arctan": "arctan(N)",
    "gate=algebraic": "algebraic(N)",
    "affinity_centring=none": "",
    "affinity_centring=row": "E by row",
    "affinity_centring=matrix": "E by matrix",
    "gate_centring=none": "",
    "gate_centring=row": "N by row",
    "gate_centring=matrix": "N by matrix",
    "doubled=0": "",
    "doubled=1": "doubled gate",
    "objective=sampled": "",
    "selection_bottleneck=0": "",
    "selection_bottleneck=1": "selection bottleneck",
    "functional_bottleneck=oracle": "",
    "functional_bottleneck=attention": "attention to operands",
    "functional_bottleneck=none": "no functional bottleneck",
}
"""What values of settings are called; "" for one that goes without saying."""

COLOURS = {
    "softmax": "#4477aa",
    "linear": "#228833",
    "hyla": "#cc3311",
    "linear_relu": "#ee8866",
    "rms_head_linear": "#aa4499",
    "coda": "#997700",
    "multi_head": "#4477aa",
    "multi_head_pairs": "#66aadd",
    "compositional": "#cc3311",
    "transformer_xl": "#009988",
    "ndr": "#cc3311",
    "geometric": "#ee8866",
    "relative_gate": "#228833",
    "abs_rel_gate": "#997700",
    "relative": "#66aadd",
    "transformer": "#4477aa",
    "lstm": "#555555",
    "bilstm": "#888888",
    "dnc": "#aa4499",
    "structural_oracle": "#117733",
    "cross_attention": "#4477aa",
    "concatenation": "#aa3377",
    "encoder": "#dd8822",
    "monolithic": "#555555",
    "id": "#4477aa",
    "ood": "#cc3311",
}
"""Colours of mechanisms and splits."""

OTHERS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888")
"""Colours of what has none of its own, in turn."""

CONTROL = "#777777"
"""The colour of controls."""

MARKERS = ("o", "s", "^", "D", "X", "v", "P", "*", "<", ">")
"""Markers of conditions, in turn."""


def name_of(key: object) -> str:
    """What something is called where people read it: its name, or its key with spaces."""
    return NAMES.get(str(key), str(key).replace("_", " "))


def setting_name(setting: str, value: object) -> str:
    """What a setting's value is called; "" if it goes without saying."""
    text = str(value) if isinstance(value, str) else f"{value:g}"
    usual = name_of(value) if isinstance(value, str) else f"{setting}={text}"
    return SETTINGS.get(f"{setting}={text}", usual)


def colour_of(key: object, number: int = 0) -> str:
    """The colour of a mechanism or split, or the `number`-th of the others."""
    return COLOURS.get(str(key), OTHERS[number % len(OTHERS)])
