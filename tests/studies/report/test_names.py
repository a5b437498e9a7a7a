import pytest

from studies.report.names import KNOWN, OTHERS, colours_of
from tests.contracts.test_studies import STUDIES


def test_mechanisms_have_their_own_colours_and_others_what_is_left():
    assert colours_of(["hyla", "softmax"]) == ["#cc3311", "#4477aa"]
    found = colours_of(["mine", "softmax", "yours"])
    assert found[1] == "#4477aa"
    assert len(set(found)) == 3


def test_two_that_have_the_same_colour_differ_in_one_plot():
    assert KNOWN["softmax"][1] == KNOWN["multi_head"][1]
    assert len(set(colours_of(["softmax", "multi_head", "mine"]))) == 3


def test_colours_come_again_only_when_there_are_no_more():
    found = colours_of([""] * (len(OTHERS) + 1))
    assert found == [*OTHERS, OTHERS[0]]


@pytest.mark.parametrize("study", STUDIES)
def test_mechanisms_of_a_study_have_colours_of_their_own_everywhere(study):
    models = {
        cell.model
        for preset in study.presets
        for cell in study.plan(preset).cells
        if hasattr(cell, "model")
    }
    own = {KNOWN[model][1] for model in models if model in KNOWN}
    assert len(own) == len(models & set(KNOWN))
