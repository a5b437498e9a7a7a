"""Colours, markers and styles of lines that all plots share."""

COLOURS = (
    "#4477aa",
    "#e69f00",
    "#882255",
    "#66ccee",
    "#cc3311",
    "#332288",
    "#ee6677",
    "#ddcc77",
)
"""Colours of categories, in order of use; chosen to differ for colour-blind readers, too."""

CONTROL = "#777777"
"""The colour of controls."""

DASHES = ("-", "--", ":", "-.")
"""Styles of lines, in order of use: what is observed is solid, its controls are not."""

MARKERS = ("o", "s", "^", "D", "X", "v", "P", "*", "<", ">")
"""Markers, in order of use."""

SMALL = 8
"""The font size of names beside axes."""
