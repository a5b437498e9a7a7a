"""Plots: the result of each probe on matplotlib axes, by one function.

Each takes the result of a probe and, optionally, the axes to draw on (by default the current ones,
as in seaborn and xarray), and returns the axes. None opens a figure or adds a legend or a colour
bar: `ax.legend()` and `ax.figure.colorbar(ax.images[-1])` do. A result with more dims than an axes
can show is refused with the selection that is missing, such as `result.sel(split="ood")`.

- `decode`, `decode_continuous`, `decode_each`: `decoding`, `confusion`; `compare_means`:
  `similarity`; `project`: `projection`.
- `interchange`, `interchange_codes`, `interchange_pairs`: `interchange`; `erase`: `erasure`.
- `extract_control_flow`: `control_flow`; captured attention and gates: `attention`, `gates`.
- `score_steps`: `steps`; `score_states`: `states`; `nudge_states`: `nudges`; `score_halting`:
  `halting`.
- `score_specialization`: `specialization`, `activation`.
- `score_pairing`: `pairing`; `summarise_value_scores`: `value_scores`.
- `score_signedness`: `signedness`, `distribution`; `score_saturation`: `distribution`.
- Any other result: `line`, `lines` and `bars` draw a variable with its interval along a dim,
  `matrix` two dims as colours.

Source of most layouts: the figures of the papers whose probes these are.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
