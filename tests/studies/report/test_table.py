from io import StringIO

import pytest
import xarray as xr
from rich.console import Console

from studies.engine import Row, Section, Table, metric
from tests.studies.engine.synthetic import two_models

ID, OOD, CHANCE = (
    metric("accuracy", "id"),
    metric("accuracy", "ood"),
    metric("accuracy_chance", "id"),
)


def printed(result, *rows, **more):
    """The words of each line."""
    table = Table(title="title", rows=rows, **more)
    result["summary"] = xr.DataTree(table.summary(result))
    stream = StringIO()
    Console(width=120, file=stream).print(table.render(result))
    return [line.split() for line in stream.getvalue().splitlines() if line.strip()]


def test_what_stands_beside_a_row_is_the_mean_of_all_conditions():
    rows = (Row("right", OOD, beside={"chance": CHANCE, "gap": OOD - CHANCE}), Row("id", ID))
    lines = printed(two_models([0.5], [0.75]), *rows)
    # Chance is 0.1 + 0 * accuracy; only the first row has something beside it.
    assert ["a", "b", "chance", "gap"] in lines
    assert ["right", "50.0", "75.0", "10.0", "52.5"] in lines
    assert ["id", "90.0", "90.0"] in lines


def test_where_conditions_are_rows_each_has_its_own_number_beside():
    row = Row("right", OOD, beside={"gap": OOD - CHANCE})
    lines = printed(two_models([0.5], [0.75]), row, Row("id", ID), conditions="rows")
    assert ["right", "right,", "gap", "id"] in lines
    assert ["a", "50.0", "40.0", "90.0"] in lines
    assert ["b", "75.0", "65.0", "90.0"] in lines


def test_what_brackets_hold_depends_on_the_number_of_seeds():
    two = printed(two_models([0.4, 0.6], [0.7, 0.9]), Row("right", OOD))
    assert ["right", "50.0", "[40-60]", "80.0", "[70-90]"] in two
    assert ["Means", "over", "two", "seeds;"] in [line[:4] for line in two]
    three = printed(two_models([0.4, 0.5, 0.6], [0.7, 0.8, 0.9]), Row("right", OOD))
    # Student's t, 2 degrees of freedom: 4.303 * 0.1 / sqrt(3) is 0.248.
    assert ["right", "50.0", "[25-75]", "80.0", "[55-105]"] in three
    one = printed(two_models([0.4], [0.7]), Row("right", OOD))
    assert ["One", "seed;"] in [line[:2] for line in one]


def test_sections_tell_rows_of_one_label_apart():
    rows = (Row("right", ID), Section(), Row("right ", OOD))
    with pytest.raises(ValueError, match="rows must have different labels, got 'right' twice"):
        Table(title="title", rows=rows).readings()
    rows = (Row("right", ID), Section("held out"), Row("right", OOD))
    assert list(Table(title="title", rows=rows).readings()) == ["right", "held out: right"]
    assert ["held", "out"] in printed(two_models([0.5], [0.75]), *rows)


@pytest.mark.parametrize("conditions", ["columns", "rows"])
def test_what_was_not_measured_is_not_shown(conditions):
    rows = (Row("right", OOD), Row("nothing", metric("accuracy", "test")))
    lines = printed(two_models([0.5], [0.75]), *rows, conditions=conditions)
    assert not any("nothing" in line for line in lines)
