"""Samples of Sort-of-CLEVR and of ESBN's tasks, compared with the tasks themselves."""

import json

import numpy as np
import pytest
import torch
import xarray as xr

import tasks
from studies.views import benchmarks
from tests.studies.engine import synthetic


def result_of(task):
    tree = xr.DataTree()
    tree.attrs["config"] = json.dumps({"setup": {"task": task}})
    return tree


def test_pictures_have_their_questions_and_answers():
    # A result that is older than a setting lacks it.
    figure = benchmarks.pictures(result_of({"n_train": 9, "n_valid": 1, "n_test": 5, "seed": 3}))
    task = tasks.SortOfClevr(tasks.SortOfClevrConfig(n_train=9, n_valid=1, n_test=5, seed=3))
    batch = task.batch("test", 0, 150)
    axes = [axis for axis in figure.axes if axis.images]
    assert len(axes) == 3
    for axis in axes:
        drawn = torch.from_numpy(np.array(axis.images[0].get_array())).permute(2, 0, 1)
        same = (batch.inputs[0] == drawn).all((1, 2, 3))
        assert same.sum() == 30
        (text,) = (text.get_text() for text in axis.texts)
        lines = text.split("\n")
        assert [line.split(":")[0] for line in lines] == ["unary", "binary", "ternary"]
        for line in lines:
            kind, rest = line.split(": ")
            subtype, rest = rest.split(", ")
            colours, answer = rest.split("? ")
            colours = colours.split(" and ")
            one_hot = torch.zeros(18)
            one_hot[tasks.SORT_OF_CLEVR_COLOURS.index(colours[0])] = 1
            if len(colours) == 2:
                one_hot[6 + tasks.SORT_OF_CLEVR_COLOURS.index(colours[1])] = 1
            one_hot[12 + list(tasks.SORT_OF_CLEVR_QUESTIONS).index(kind)] = 1
            one_hot[15 + tasks.SORT_OF_CLEVR_QUESTIONS[kind].index(subtype)] = 1
            asked = same & (batch.inputs[1] == one_hot).all(1)
            assert asked.sum() == 1
            assert tasks.SORT_OF_CLEVR_ANSWERS[int(batch.targets[asked])] == answer


@pytest.mark.parametrize("seed", range(4))
def test_the_framed_candidate_is_the_answer(seed):
    figure = benchmarks.problems(result_of({"rule": "rmts", "n_withheld": 95, "seed": seed}))
    rows = np.array(figure.axes).reshape(4, 9)
    expected = {"same_different": 2, "rmts": 6, "distribution_of_three": 9, "identity_rules": 9}
    for (rule, n_images), row in zip(expected.items(), rows, strict=True):
        shown = [axis for axis in row if axis.images]
        assert len(shown) == n_images
        images = [axis.images[0].get_array() for axis in shown]
        same = [[bool((a == b).all()) for b in images] for a in images]
        framed = [n for n, axis in enumerate(shown) if axis.spines["top"].get_linewidth() == 2]
        title = row[0].get_title(loc="left")
        if rule == "same_different":
            assert framed == []
            assert title.endswith("same" if same[0][1] else "different")
        elif rule == "rmts":
            pairs = {framed[0]: same[0][1] == same[framed[0]][framed[1]]}
            assert len(framed) == 2
            assert framed in ([2, 3], [4, 5])
            assert pairs[framed[0]]
            assert title.endswith(f"answer {framed[0] // 2}")
        else:
            (right,) = framed
            if rule == "distribution_of_three":
                # The object of the first row that the second one lacks.
                (source,) = [n for n in range(3) if not any(same[n][m] for m in (3, 4))]
            else:
                # In the second row as in the first: like its first object or like its second.
                source = 3 if same[0][2] else 4
            assert same[right][source]
            assert title.endswith(f"answer {right - 4}")


def test_value_scores_are_of_the_first_network_with_the_chosen_rate():
    cells = [
        {"model": model, "n_retrievals": n, "scorer": scorer, "learning_rate": rate, "seed": 3}
        | {"id": 0.5, "ood": 0.5, "validation": rate}
        for model, n, scorer in (
            ("multi_head", None, None),
            ("compositional", 2, "mlp"),
            ("compositional", 4, "mlp"),
        )
        for rate in (0.1, 0.2)
    ]
    result = synthetic.result_of(cells, tuned=("learning_rate",))
    shape = (len(cells), 1, 1, 2, 1, 4)
    scores = np.full(shape, np.nan)
    for cell in (2, 3):
        scores[cell, ..., :2] = [0.1 * cell, 1 - 0.1 * cell]
    dims = ("cell", "group", "layer", "token", "search", "retrieval")
    labels = {"group": ["all"], "layer": ["0"], "token": ["all", "last"]}
    of_cells = {k: v for k, v in result["scores"].coords.items() if v.dims == ("cell",)}
    data = xr.Dataset(
        {"value_scores": (dims, scores), "tightness": ("cell", scores[:, 0, 0, 0, 0, 0])},
        labels | of_cells,
    )
    result["value_scores"] = xr.DataTree(data)
    figure = benchmarks.value_scores(result, n_retrievals=2)
    drawn = figure.axes[0].images[0]
    np.testing.assert_allclose(drawn.get_array(), [[0.3, 0.7]])
    assert drawn.colorbar.ax.get_ylabel() == "mean value score"
    assert figure.get_suptitle() == "compositional, R=2, linear scorer, seed 3"
    assert benchmarks.value_scores(result, n_retrievals=4) is None
