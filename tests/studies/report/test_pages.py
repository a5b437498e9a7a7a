import json

import numpy as np
import pytest
import xarray as xr
from jinja2 import UndefinedError

from studies.engine import Claim, Row, Table, metric, percent
from studies.engine.study import Study
from studies.report.pages import Numbers, loose_words, render_page
from tests.studies.engine import toy
from tests.studies.engine.synthetic import two_models

STUDY = Study(
    name="toy",
    question="?",
    setup=toy.TOY.setup,
    grids=({"seed": (0,)},),
    claims=(
        Claim("a is better", "P", metric("accuracy", "ood"), {"model": "a"}, {"model": "b"}),
        Claim("a is not far", "P", metric("accuracy", "ood"), {"model": "a"}, 0.9),
    ),
    table=Table(title="Right answers", rows=(Row("ood", metric("accuracy", "ood"), percent),)),
)


CONFIG = {
    "setup": {"depths": [8, 10], "halts": False, "model": "a", "training": {"n_steps": 20000}},
    "grids": [{"seed": [0]}],
    "where": {},
}


@pytest.fixture(scope="module")
def result():
    result = two_models([0.80, 0.82, 0.81], [0.50, 0.53, 0.51])
    for name, data in STUDY.judge(result).items():
        result[name] = xr.DataTree(data)
    result.attrs |= {"study": "toy", "config": json.dumps(CONFIG)}
    return result


def rendered(result, text):
    return render_page(text, {"result.nc": result}, {"toy": STUDY}, width=80)


OOD = 'cells("scores/accuracy", split="ood", group="all", model="{}")'


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ("", ".81"),
        (".percent", "81"),
        (".percent.range", "80 to 82"),
        (".percent.each", "80, 82 and 81"),
        (".decimals(2).range", ".80 to .82"),
        (".n", "three"),
        (".above(0.805)", "two"),
        (".below(0.805)", "one"),
    ],
)
def test_numbers_of_models_in_words(result, ending, text):
    template = "Right: {{ " + OOD.format("a") + ending + " }}."
    assert rendered(result, template) == f"Right: {text}."


def test_a_range_of_equal_numbers_is_one_and_large_numbers_are_whole():
    assert Numbers(np.array([0.501, 0.503])).percent.range == "50"
    assert str(Numbers(np.array([31_000.0, 30_000.0])).whole) == "30,500"
    assert Numbers(np.array([0.1, 0.1, 0.7])).median == ".1"
    assert Numbers(np.array([0.25])).each == ".25"
    assert Numbers(np.ones(12)).n == "12"


def test_one_seed_can_be_chosen(result):
    template = '{{ cells("scores/accuracy", split="ood", group="all", model="b", seed=1) }}'
    assert rendered(result, template) == ".53"


def test_a_mean_over_a_dim_is_taken_before_models_are_compared(result):
    tasks = result.copy()
    loss = xr.DataArray([0.0, 0.5, 1.0], dims="task") + 0 * tasks["scores"]["seed"]
    scores = tasks["scores"].to_dataset().assign(loss=loss)
    tasks["scores"] = xr.DataTree(scores)
    template = '{{ cells("scores/loss"MEAN, model="b").range }}'
    assert rendered(tasks, template.replace("MEAN", ', mean=["task"]')) == ".5"
    with pytest.raises(ValueError, match="labels must also have task"):
        rendered(tasks, template.replace("MEAN", ""))


def test_an_axis_by_which_numbers_differ_must_be_named(result):
    every = 'cells("scores/accuracy", split="ood", group="all"{}).n'
    with pytest.raises(ValueError, match=r"also have model .*, one of a, b, or '\*' for all; got"):
        rendered(result, "{{ " + every.format("") + " }}")
    assert rendered(result, "{{ " + every.format(', model="*"') + " }}") == "six"
    same = result.copy()
    scores = same["scores"].to_dataset()
    same["scores"] = xr.DataTree(scores.assign(accuracy=xr.ones_like(scores["accuracy"])))
    assert rendered(same, "{{ " + every.format("") + " }}") == "six"


def test_models_with_worse_tuned_settings_are_left_out(result):
    tuned = result.copy()
    scores = tuned["scores"].to_dataset()
    chosen = scores["chosen"].copy()
    chosen[0] = 0
    tuned["scores"] = xr.DataTree(scores.assign_coords(chosen=chosen))
    assert rendered(tuned, "{{ " + OOD.format("a") + ".percent.each }}") == "82 and 81"


@pytest.mark.parametrize(("minutes", "text"), [(119, "119 minutes"), (121, "2 hours")])
def test_long_times_are_in_hours(result, minutes, text):
    slow = result.copy()
    training = slow["training"].to_dataset()
    training["seconds"] = 10 * minutes * xr.ones_like(training["seconds"])
    slow["training"] = xr.DataTree(training)
    assert rendered(slow, "{{ machine_time() }}") == text


def test_settings_verdicts_and_the_table(result):
    assert rendered(result, '{{ setting("training.n_steps") }} steps') == "20,000 steps"
    assert rendered(result, '{{ setting("depths.1") }}') == "10"
    assert rendered(result, '{{ verdict("a is better") }}') == "holds"
    assert rendered(result, '{{ verdict("a is*") }}') == "holds or contradicted"
    assert rendered(result, '{{ effect("a is better") }}') == ".3 [.28; .31] (3)"
    # Six models, a minute each.
    assert rendered(result, "{{ machine_time() }}") == "6 minutes"
    table = rendered(result, "{{ table() }}\n")
    assert table.startswith("```text\n")
    assert table.endswith("\n```\n")
    assert "Right answers" in table
    assert "81.0" in table
    claims = rendered(result, "{{ claims() }}")
    summary = "Verdicts on 2 comparisons (holds: 1, contradicted: 1)"
    assert claims.startswith(f"<details><summary>{summary}</summary>\n\n```text\n")
    assert claims.endswith("\n```\n\n</details>")
    assert "a is better (P)" in claims


def test_below_claims_stands_what_a_reader_may_judge_otherwise(result):
    changed = result.copy()
    fairness = result["fairness"].to_dataset().copy(deep=True)
    fairness["at_edge"][:] = [1, 0]
    changed["fairness"] = xr.DataTree(fairness)
    claims = rendered(changed, "{{ claims() }}")
    note = "best tuned value at the edge of those tried: a"
    assert claims.endswith(f"\n```\n\n- {note}\n\n</details>")
    # Without claims that were run there is nothing to fold.
    verdicts = result["claims"].to_dataset().copy(deep=True)
    verdicts["verdict"][:] = "not run"
    changed["claims"] = xr.DataTree(verdicts)
    assert rendered(changed, "{{ claims() }}") == f"- {note}"


N_STEPS = "training.n_steps"


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"grids": [{N_STEPS: [20000, 1]}]}, "20000, 1"),
        # A grid need not have the value of the shared settings.
        ({"grids": [{N_STEPS: [1]}]}, "20000, 1"),
        ({"grids": [{"seed": [0]}, {N_STEPS: [1]}]}, "20000, 1"),
        ({"where": {"model": {"b": {N_STEPS: 1}}}, "grids": [{"model": ["a", "b"]}]}, "20000, 1"),
        ({"where": {"model": {"a": {N_STEPS: 1}}}}, "20000, 1"),
        ({"where": {"halts": {"False": {N_STEPS: 1}}}}, "20000, 1"),
    ],
)
def test_a_setting_in_which_models_differ_is_an_error(result, changes, values):
    other = result.copy()
    other.attrs["config"] = json.dumps(CONFIG | changes)
    with pytest.raises(ValueError, match=f"of all models, got {N_STEPS} of toy: {values}$"):
        rendered(other, f"{{{{ setting('{N_STEPS}') }}}}")


@pytest.mark.parametrize(
    "changes",
    [
        {"grids": [{"depths": [[8, 10], [6, 7]]}]},
        {"where": {"model": {"b": {"depths": [6, 7]}}}, "grids": [{"model": ["a", "b"]}]},
    ],
)
def test_a_part_of_a_setting_in_which_models_differ_is_an_error(result, changes):
    other = result.copy()
    other.attrs["config"] = json.dumps(CONFIG | changes)
    with pytest.raises(ValueError, match=r"of all models, got depths.1 of toy: 10, 7$"):
        rendered(other, "{{ setting('depths.1') }}")


@pytest.mark.parametrize(
    "changes",
    [
        {"grids": [{N_STEPS: [20000]}]},
        {"where": {"model": {"b": {N_STEPS: 1}}}},
        {"where": {"model": {"a": {"depths": [8]}}}},
        # Axes win.
        {"where": {"model": {"a": {N_STEPS: 1}}}, "grids": [{N_STEPS: [20000]}]},
    ],
)
def test_a_setting_that_others_would_have_is_one_of_all_models(result, changes):
    other = result.copy()
    other.attrs["config"] = json.dumps(CONFIG | changes)
    assert rendered(other, f"{{{{ setting('{N_STEPS}') }}}}") == "20,000"


def test_claims_of_papers_are_counted():
    verdicts = {
        "verdict": ("claim", ["holds", "undecided", "undecided"]),
        "verdict_over_files": ("claim", ["undecided"] * 3),
    }
    files = {"claims.nc": xr.DataTree.from_dict({"claims": xr.Dataset(verdicts)})}
    template = '{{ n_claims("undecided") }} of {{ n_claims() }}, {{ n_claims("not run") }}'
    assert render_page(template, files, {}, width=80) == "2 of 3, 0"
    template = '{{ n_claims("holds") }}, {{ n_claims("holds", over_files=true) }}'
    assert render_page(template, files, {}, width=80) == "1, 0"
    with pytest.raises(ValueError, match=r"verdict must be one of holds, .*, got 'open'"):
        render_page('{{ n_claims("open") }}', files, {}, width=80)


def test_claims_of_papers_are_listed_and_counted_by_paper():
    of = {
        "verdict": ("claim", ["holds", "undecided", "holds", "holds"]),
        "paper": ("claim", ["tay_2019", "tay_2019", "csordas_2021", "tay_2019"]),
        "claimed": ("claim", ["it subtracts", "it does not", "NDR waits", "it adds"]),
    }
    files = {"claims.nc": xr.DataTree.from_dict({"claims": xr.Dataset(of)})}
    template = '{{ list_claims("holds", "tay_2019") }}, {{ n_claims("holds", paper="tay_2019") }}'
    assert render_page(template, files, {}, width=80) == "*it subtracts*; *it adds*, 2"
    template = '{{ list_claims("not run", "tay_2019") }}'
    assert render_page(template, files, {}, width=80) == "none"
    with pytest.raises(ValueError, match=r"paper must be one of tay_2019, .*, got 'tay'"):
        render_page('{{ n_claims("holds", paper="tay") }}', files, {}, width=80)


def test_each_file_of_a_page_can_be_asked(result):
    other = two_models([0.1], [0.2])
    results = {"result.nc": result, "other.nc": other}
    asked = OOD.format("a")[:-1] + ', file="other.nc")'
    text = render_page("{{ " + asked + " }}", results, {"toy": STUDY}, width=80)
    assert text == ".1"


def test_what_is_not_there_is_an_error(result):
    with pytest.raises(ValueError, match="labels must also have group for scores/accuracy"):
        rendered(result, '{{ cells("scores/accuracy", split="ood") }}')
    with pytest.raises(ValueError, match="has no value for a model with"):
        rendered(result, "{{ " + OOD.format("c") + " }}")
    with pytest.raises(KeyError):
        rendered(result, '{{ cells("scores/f1", split="ood", group="all") }}')
    with pytest.raises(KeyError):
        rendered(result, '{{ setting("training.n_stepz") }}')
    with pytest.raises(ValueError, match="no claim is like 'b is better'"):
        rendered(result, '{{ verdict("b is better") }}')
    with pytest.raises(ValueError, match="must be those of one comparison, got a is better"):
        rendered(result, '{{ effect("a is*") }}')
    with pytest.raises(UndefinedError, match="'cell' is undefined"):
        rendered(result, "{{ cell }}")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("At K = 2, in 2024, Table 6 and three seeds.", []),
        ("It is right for 54% of them.", ["54%"]),
        ("A loss of .21, or 0.3.", [".21", "0.3"]),
        ("After 14,000 steps.", ["14,000"]),
        ("`--minutes 90` and {{ setting('x.10') }} and [a](b/2345.png)", []),
        ("```text\n12.5 13.5\n```\n", []),
        ("It is {{ verdict('a*') }}, that is, `undecided`.", ["undecided"]),
        ("The claim holds.", ["holds"]),
    ],
)
def test_numbers_and_verdicts_that_no_file_bears_are_found(text, found):
    assert loose_words(text) == found
