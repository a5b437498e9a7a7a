"""Views of the study of fuzzy logic that a smoke run, with one rate, does not tell apart."""

import numpy as np
import xarray as xr

from studies.views import fuzzy_logic
from tests.studies.engine.synthetic import result_of


def test_samples_show_the_answer_of_a_network_with_the_chosen_rate():
    cells = [
        {
            "model": model,
            "learning_rate": rate,
            "seed": 0,
            "id": 0.5,
            "ood": 0.5,
            "validation": rate,
        }
        for model in ("hyla", "linear")
        for rate in (0.1, 0.2)
    ]
    result = result_of(cells, tuned=("learning_rate",))
    shape = (len(cells), 1)
    result["samples"] = xr.DataTree(
        xr.Dataset(
            {
                "point": (("cell", "example", "pos", "variable"), np.zeros((*shape, 3, 2))),
                "value": (("cell", "example", "pos"), np.full((*shape, 3), 0.5)),
                "literal": (("cell", "example", "term", "variable"), np.ones((*shape, 1, 2))),
                "answer": (("cell", "example"), [[0.1], [0.2], [0.3], [0.4]]),
            }
        )
    )
    (axis,) = fuzzy_logic.samples(result).axes
    assert axis.get_xlabel().endswith("asked for: 0.50, answered by HYLA: 0.20")
