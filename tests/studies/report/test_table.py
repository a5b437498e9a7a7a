import json
import re
from io import StringIO

import numpy as np
import pytest
import xarray as xr
from rich.console import Console

from studies.engine import Claim, Row, Section, Table, TrainedIf, metric
from studies.engine.claims import judge
from studies.engine.fairness import assess
from studies.engine.readings import Reading, unmeasured
from studies.report.verdicts import render_claims, render_fairness
from tests.studies.engine.synthetic import result_of, two_models

ID, OOD, CHANCE = (
    metric("accuracy", "id"),
    metric("accuracy", "ood"),
    metric("accuracy_chance", "id"),
)


def render(table):
    """The printed text of a table."""
    stream = StringIO()
    Console(width=120, file=stream).print(table)
    return stream.getvalue()


def printed(result, *rows, conditions="columns"):
    """The words of each printed line of a table with these rows."""
    table = Table(title="title", rows=rows, conditions=conditions)
    result["summary"] = xr.DataTree(table.summary(result))
    return [
        re.sub(r"(?<=[0-9]); ", ";", line).split()
        for line in render(table.render(result)).splitlines()
        if line.strip()
    ]


def test_extra_columns_show_the_mean_over_all_conditions():
    rows = (Row("right", OOD, beside={"chance": CHANCE, "gap": OOD - CHANCE}), Row("id", ID))
    lines = printed(two_models([0.5], [0.75]), *rows)
    # Chance is 0.1; only the first row has extra columns.
    assert ["a", "b", "chance", "gap"] in lines
    assert ["right", "50.0", "75.0", "10.0", "52.5"] in lines
    assert ["id", "90.0", "90.0"] in lines


def test_where_conditions_are_rows_extra_columns_show_one_number_each():
    row = Row("right", OOD, beside={"gap": OOD - CHANCE})
    lines = printed(two_models([0.5], [0.75]), row, Row("id", ID), conditions="rows")
    assert ["right", "right,", "gap", "id"] in lines
    assert ["a", "50.0", "40.0", "90.0"] in lines
    assert ["b", "75.0", "65.0", "90.0"] in lines


def test_the_content_of_brackets_depends_on_the_number_of_seeds():
    two = printed(two_models([0.4, 0.6], [0.7, 0.9]), Row("right", OOD))
    assert ["right", "50.0", "[40;60]", "80.0", "[70;90]"] in two
    assert ["Means", "over", "two", "seeds;"] in [line[:4] for line in two]
    three = printed(two_models([0.4, 0.5, 0.6], [0.7, 0.8, 0.9]), Row("right", OOD))
    # Student's t with 2 degrees of freedom: 4.303 * 0.1 / sqrt(3) is 0.248.
    assert ["right", "50.0", "[25;75]", "80.0", "[55;105]"] in three
    one = printed(two_models([0.4], [0.7]), Row("right", OOD))
    assert ["One", "seed;"] in [line[:2] for line in one]


def test_the_caption_says_where_there_are_fewer_seeds():
    result = two_models([0.4, 0.5, 0.6], [0.7, 0.8])
    lines = printed(result, Row("right", OOD))
    assert ["right", "50.0", "[25;75]", "75.0", "[70;80]"] in lines
    text = " ".join(word for line in lines for word in line)
    rest = "seeds; brackets: their 95% intervals (Student's t)"
    assert f"Means over up to 3 {rest}, of two both of them." in text
    # Nothing is said of brackets that are not shown.
    lines = printed(result, Row("right", OOD, spread=False))
    assert f"Means over up to 3 {rest}." in " ".join(word for line in lines for word in line)
    result = two_models([0.4, 0.5, 0.6], [0.7])
    scores = result["scores"].to_dataset()
    bounds = {"accuracy_low": scores["accuracy"] - 0.1, "accuracy_high": scores["accuracy"] + 0.2}
    result["scores"] = xr.DataTree(scores.assign(bounds))
    lines = printed(result, Row("right", OOD))
    assert ["right", "50.0", "[25;75]", "70.0", "[60;90]"] in lines
    text = " ".join(word for line in lines for word in line)
    assert f"Means over up to 3 {rest}, of a single one that over examples." in text


def test_brackets_of_one_seed_are_intervals_over_examples():
    result = two_models([0.4], [0.7])
    scores = result["scores"].to_dataset()
    bounds = {"accuracy_low": scores["accuracy"] - 0.1, "accuracy_high": scores["accuracy"] + 0.2}
    result["scores"] = xr.DataTree(scores.assign(bounds))
    lines = printed(result, Row("right", OOD))
    assert ["right", "40.0", "[30;60]", "70.0", "[60;90]"] in lines


@pytest.mark.parametrize("conditions", ["columns", "rows"])
def test_the_caption_has_notes_of_what_is_shown_alone_each_once(conditions):
    result = two_models([0.4, 0.5, 0.6], [0.7, 0.8, 0.9])
    missing = Reading("never measured", unmeasured)
    rows = (
        Row("id", ID, note="Id: as in training."),
        Row("never", missing, note="Never: not there."),
        Section("more", "More: as well."),
        Row("right", OOD, note="Right: share."),
        Row("again", OOD, note="Right: share."),
        Section("none", "None: nothing."),
        Row("not either", missing),
        Section("beside", "Beside: it alone."),
        Row("gap", missing, beside={"gap": OOD - CHANCE}),
    )
    table = Table(title="title", rows=rows, caption="All of it.", conditions=conditions)
    caption = str(table.render(result).caption)
    notes = "All of it. Id: as in training. More: as well. Right: share. Beside: it alone. "
    assert caption == f"{notes}Means over 3 seeds; brackets: their 95% intervals (Student's t)."


def test_only_models_with_the_chosen_settings_are_shown():
    cells = [
        {"model": "a", "rate": rate, "seed": s, "id": 0.9, "ood": 0.5 + rate, "validation": rate}
        for rate in (0.1, 0.3)
        for s in range(2)
    ]
    lines = printed(result_of(cells, tuned=("rate",)), Row("right", OOD))
    assert ["right", "80.0", "[80;80]"] in lines
    assert ["Means", "over", "two", "seeds;"] in [line[:4] for line in lines]


def test_claims_are_shown_with_effect_interval_and_verdict():
    sides = {"reading": OOD, "of": {"model": "a"}}
    claims = [
        Claim("a is better", "ours", **sides, exceeds={"model": "b"}),
        Claim("a is far better", "ours", **sides, exceeds={"model": "b"}, margin=0.28),
        Claim("a is better than c", "ours", **sides, exceeds={"model": "c"}),
    ]
    result = two_models([0.80, 0.82, 0.84], [0.50, 0.55, 0.54])
    result["claims"] = xr.DataTree(judge(result, claims, assess(result, None)))
    text = render(render_claims(result))
    rows = [line.split("(ours)") for line in text.splitlines() if "(ours)" in line]
    cells = {statement.strip(): words.split() for statement, words in rows}
    # Differences .3, .27, .3: their mean .29 has the interval .29 -+ 4.303 * .0173 / sqrt(3).
    assert cells["a is better"] == [".29", "[.25,", ".33]", "3", "holds"]
    assert cells["a is far better"][:5] == [".29", "[.25,", ".33]", "3", "undecided:"]
    assert "a is better than c" not in text
    text_in_one_line = " ".join(text.split())
    assert "seeds would decide" in text_in_one_line
    assert "1 further claims ask for settings that were not run" in text_in_one_line
    result["claims"] = result["claims"].isel(claim=[2])
    assert render_claims(result) is None


def test_models_that_differ_in_data_too_are_not_called_seeds():
    result = two_models([0.80, 0.82, 0.84], [0.50, 0.75, 0.34])
    claim = Claim("a is better", "ours", OOD, {"model": "a"}, exceeds={"model": "b"})
    result["claims"] = xr.DataTree(judge(result, [claim], assess(result, None)))
    axes = json.loads(result.attrs["axes"])
    axes |= {
        "pairs": [*axes["pairs"], "task_seed"],
        "coordinates": axes["coordinates"] | {"task_seed": "task.seed"},
    }
    result["scores"] = (
        result["scores"]
        .to_dataset()
        .assign_coords(task_seed=("cell", result["scores"]["seed"].data))
    )
    result.attrs["axes"] = json.dumps(axes)
    text = " ".join(render(render_claims(result)).split())
    assert "mean over models, paired" in text
    assert "models would decide" in text
    assert "seeds" not in text
    table = Table(title="t", rows=(Row("ood", OOD),))
    assert "Means over 3 models" in render(table.render(result))


def test_conditions_that_are_not_trained_or_still_improve_are_named():
    cells = [
        {"model": m, "rate": rate, "seed": 0, "id": right, "ood": 0.5, "validation": v}
        for m, right, best in (("a", 0.9, 0.2), ("b", 0.4, 0.4))
        for rate, v in ((r, 1 - abs(r - best)) for r in (0.1, 0.2, 0.4))
    ]
    gains = [0.0] * 3 + [0.5] * 3
    result = result_of(cells, tuned=("rate",), late_gain=gains)
    result["fairness"] = xr.DataTree(assess(result, TrainedIf(reaches=0.5)).data)
    assert render_fairness(result) == [
        "not trained: b",
        "still improving at the end of training: b",
        "best tuned value at the edge of those tried: b",
    ]
    result["fairness"]["values_tied"][:] = [1, 3]
    assert render_fairness(result)[-1] == (
        "tuned values with equal scores, of which the first counts: b"
    )


def test_rows_with_the_same_label_must_be_in_different_sections():
    rows = (Row("right", ID), Section(), Row("right ", OOD))
    with pytest.raises(ValueError, match="rows must have different labels, got 'right' twice"):
        Table(title="title", rows=rows).readings()
    rows = (Row("right", ID), Section("held out"), Row("right", OOD))
    assert list(Table(title="title", rows=rows).readings()) == ["right", "held out: right"]
    assert ["held", "out"] in printed(two_models([0.5], [0.75]), *rows)


def test_sections_without_rows_are_not_shown():
    nothing = Row("nothing", metric("accuracy", "test"))
    rows = (Section("empty"), nothing, Section("full"), Row("right", OOD), Section("last"), nothing)
    lines = printed(two_models([0.5], [0.75]), *rows)
    titles = [line for line in lines if line and line[0] in ("empty", "full", "last")]
    assert titles == [["full"]]


@pytest.mark.parametrize("conditions", ["columns", "rows"])
def test_rows_without_any_number_are_not_shown(conditions):
    rows = (Row("right", OOD), Row("nothing", metric("accuracy", "test")))
    lines = printed(two_models([0.5], [0.75]), *rows, conditions=conditions)
    assert not any("nothing" in line for line in lines)


def test_further_conditions_are_shown_below_with_the_rows_that_they_have(monkeypatch):
    monkeypatch.setattr("studies.report.table.MOST_COLUMNS", 1)
    lines = printed(two_models([0.5], [np.nan]), Row("right", OOD), Section("part"), Row("id", ID))
    first = [["a"], ["right", "50.0"], ["part"], ["id", "90.0"]]
    below = [["b"], ["part"], ["id", "90.0"]]
    assert [line for line in lines if line in first + below] == first + below


def test_fewer_conditions_with_long_names_are_beside_each_other():
    names = [f"{letter}-with-a-long-name-of-its-own" for letter in "abcd"]
    result = result_of([{"model": model, "seed": 0, "id": 0.9, "ood": 0.5} for model in names])
    table = Table(title="", rows=(Row("right", OOD),)).render(result)
    assert [str(column.header) for column in table.columns] == ["", *names[:2]]
    assert names[2] in list(table.columns[1].cells)


def test_extra_columns_are_under_their_heading_where_a_block_is_narrower(monkeypatch):
    monkeypatch.setattr("studies.report.table.MOST_COLUMNS", 3)
    result = result_of([{"model": model, "seed": 0, "id": 0.9, "ood": 0.5} for model in "abc"])
    table = Table(title="", rows=(Row("right", OOD, beside={"chance": CHANCE}),)).render(result)
    assert [list(column.cells) for column in table.columns][1:] == [
        ["50.0", "c", "50.0"],
        ["50.0", "", ""],
        ["10.0", "chance", "10.0"],
    ]
