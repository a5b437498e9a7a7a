import pytest

from probes.plots import COLOURS
from studies.report.names import KNOWN, colours_of
from tests.contracts.test_studies import STUDIES


def test_mechanisms_have_fixed_colours_and_other_keys_unused_ones():
    assert colours_of(["hyla", "softmax"]) == ["#cc3311", "#4477aa"]
    colours = colours_of(["mine", "softmax", "yours"])
    assert colours[1] == "#4477aa"
    assert len(set(colours)) == 3


def test_two_keys_with_the_same_fixed_colour_differ_in_one_plot():
    assert KNOWN["softmax"][1] == KNOWN["multi_head"][1]
    assert len(set(colours_of(["softmax", "multi_head", "mine"]))) == 3


def test_colours_repeat_only_when_all_are_used():
    assert colours_of([""] * (len(COLOURS) + 1)) == [*COLOURS, COLOURS[0]]


@pytest.mark.parametrize("study", STUDIES)
def test_the_mechanisms_of_a_study_have_different_fixed_colours(study):
    models = {
        cell.model
        for preset in study.presets
        for cell in study.plan(preset).cells
        if hasattr(cell, "model")
    }
    colours = {KNOWN[model][1] for model in models if model in KNOWN}
    assert len(colours) == len(models & set(KNOWN))
