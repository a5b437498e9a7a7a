import json
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import xarray as xr

from studies.engine import Claim, Row, Table, metric
from studies.engine.ledger import ledger, verdict_of
from studies.engine.paper_claims import Claimed, PaperClaim
from studies.engine.study import Study
from studies.report.ledger import _needs, ledger_page
from tests.studies.engine import toy
from tests.studies.engine.synthetic import result_of

HOLDS, CONTRADICTED, UNDECIDED = ["holds"], ["contradicted"], ["undecided"]
REFUSED, NOTHING = ["not comparable"], ["not run"]


def claim_of(holds_if="all"):
    return PaperClaim(id="c", statement="s", decided_by={"toy": ["A*", "B*"]}, holds_if=holds_if)


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ((HOLDS, HOLDS), "holds"),
        ((HOLDS * 3, HOLDS + REFUSED), "holds"),
        ((HOLDS, HOLDS + UNDECIDED), "undecided"),
        # What holds in part is not known to hold.
        ((HOLDS, NOTHING), "undecided"),
        ((HOLDS, REFUSED), "undecided"),
        ((HOLDS * 9, CONTRADICTED), "contradicted"),
        ((CONTRADICTED, NOTHING), "contradicted"),
        ((REFUSED, NOTHING), "not comparable"),
        ((NOTHING, NOTHING), "not run"),
        ((), "not run"),
    ],
)
def test_a_claim_holds_if_all_its_parts_do(parts, verdict):
    assert verdict_of(claim_of(), dict(enumerate(parts))) == verdict


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        (HOLDS * 3 + CONTRADICTED + UNDECIDED, "holds"),
        (HOLDS * 2 + UNDECIDED * 2, "undecided"),
        (HOLDS + CONTRADICTED * 2, "contradicted"),
        (HOLDS + CONTRADICTED, "contradicted"),
        (REFUSED * 2, "not comparable"),
        (NOTHING, "not run"),
    ],
)
def test_a_claim_about_most_cases_needs_most_of_them(verdicts, verdict):
    assert verdict_of(claim_of("most"), {"A": verdicts}) == verdict


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ((CONTRADICTED + UNDECIDED, NOTHING), "undecided"),
        ((CONTRADICTED * 2 + UNDECIDED, NOTHING), "contradicted"),
        ((HOLDS, REFUSED), "undecided"),
        ((HOLDS * 2, REFUSED), "holds"),
    ],
)
def test_of_most_cases_those_that_nobody_ran_are_open(parts, verdict):
    assert verdict_of(claim_of("most"), dict(enumerate(parts))) == verdict


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        (HOLDS + UNDECIDED + CONTRADICTED, "holds"),
        (CONTRADICTED * 2, "contradicted"),
        # What nobody ran or could compare may hold.
        (CONTRADICTED + UNDECIDED, "undecided"),
        (CONTRADICTED + NOTHING, "undecided"),
        (CONTRADICTED + REFUSED, "undecided"),
        (NOTHING, "not run"),
    ],
)
def test_a_claim_about_a_part_needs_one_comparison(verdicts, verdict):
    assert verdict_of(claim_of("any"), {"A": verdicts}) == verdict


def test_a_claim_of_a_paper_has_claims_of_studies_or_lacks_something():
    with pytest.raises(ValueError, match="'c' must have either decided_by or lacks"):
        PaperClaim(id="c", statement="s")
    with pytest.raises(ValueError, match="'c' must have either decided_by or lacks"):
        PaperClaim(id="c", statement="s", decided_by={"toy": ["A"]}, lacks="data")
    with pytest.raises(ValueError, match="'c' must have needs only with decided_by"):
        PaperClaim(id="c", statement="s", lacks="a model", needs="data")
    with pytest.raises(ValueError, match="holds_if must be all, most or any, got 'some' in 'c'"):
        PaperClaim(id="c", statement="s", lacks="data", holds_if="some")


B = {"model": "b"}


def result_with(first, second, width=None, than=B, rates=1, draws=1):
    """A judged result of two models with these OOD scores, best at the first of some rates.

    With `width` it has it as an axis. Seeds take turns with the draws of the data.
    """
    varied = {} if width is None else {"width": width}
    cells = [
        {"model": model, "seed": seed, "id": 0.9 - 0.1 * k, "ood": score, **varied}
        | ({"rate": k} if rates > 1 else {})
        | ({"draw": seed % draws} if draws > 1 else {})
        for model, scores in (("a", first), ("b", second))
        for seed, score in enumerate(scores)
        for k in range(rates)
    ]
    pairs = ("seed", "draw") if draws > 1 else ("seed",)
    result = result_of(cells, tuned=["rate"] if rates > 1 else (), pairs=pairs)
    result.attrs["config"] = json.dumps({"setup": {"model": "a", "width": 8}})
    claims = (
        Claim("A is better", "P", metric("accuracy", "ood"), {"model": "a"}, than),
        Claim("C is better", "P", metric("accuracy", "ood"), {"model": "c"}, {"model": "b"}),
    )
    study = Study(
        name="toy",
        question="?",
        setup=toy.TOY.setup,
        grids=({"seed": (0,)},),
        claims=claims,
        table=Table(title="t", rows=(Row("ood", metric("accuracy", "ood")),)),
    )
    for name, data in study.judge(result).items():
        result[name] = xr.DataTree(data)
    result.attrs["study"] = "toy"
    return result


PAPER = Claimed(
    "Someone 2020, A Paper",
    (
        PaperClaim(id="first", statement="a beats b", decided_by={"toy": ["A is*"]}),
        PaperClaim(id="both", statement="a and c beat b", decided_by={"toy": ["* is better"]}),
        PaperClaim(id="never", statement="c beats b", decided_by={"toy": ["C is*"]}),
        PaperClaim(id="data", statement="on their data", lacks="their data"),
    ),
)
REMEDIES = {("toy", "C is better"): "preset `more`: 6 models"}
CLEAR = [0.80, 0.82, 0.81], [0.50, 0.53, 0.51]


def entry_of(tree, name):
    claims = tree["claims"].to_dataset()
    return claims.isel(claim=claims["id"].to_numpy().tolist().index(name))


def test_a_result_without_claims_changes_nothing_in_the_ledger():
    result = result_with(*CLEAR)
    without = result.copy()
    without["claims"] = xr.DataTree(replace(toy.TOY, claims=()).judge(result)["claims"])
    alone = ledger({"r.nc": result}, {"someone_2020": PAPER}, REMEDIES)
    both = ledger({"r.nc": result, "s.nc": without}, {"someone_2020": PAPER}, REMEDIES)
    for name in ("claims", "comparisons"):
        xr.testing.assert_identical(both[name].to_dataset(), alone[name].to_dataset())
        kinds = [{key: of.dtype for key, of in one[name].items()} for one in (both, alone)]
        assert kinds[0] == kinds[1]


def test_the_ledger_has_every_claim_of_the_papers():
    tree = ledger({"r.nc": result_with(*CLEAR)}, {"someone_2020": PAPER}, REMEDIES)
    verdicts = {name: entry_of(tree, name)["verdict"].item() for name in ("first", "both")}
    assert verdicts == {"first": "holds", "both": "undecided"}
    assert entry_of(tree, "both")["lacks"] == "not run: toy: C is better (preset `more`: 6 models)"
    for name in ("never", "data"):
        assert entry_of(tree, name)["verdict"] == "not run"
    assert entry_of(tree, "data")["lacks"] == "their data"
    # One comparison was run, and two claims rest on it.
    comparisons = tree["comparisons"].to_dataset()
    assert comparisons["id"].to_numpy().tolist() == ["first", "both"]
    assert comparisons["effect"].to_numpy() == pytest.approx(2 * [0.81 - 0.51333], abs=1e-4)
    assert comparisons["examples"].to_numpy().tolist() == [800, 800]


def test_what_no_preset_runs_is_named():
    tree = ledger({"r.nc": result_with(*CLEAR)}, {"someone_2020": PAPER}, {})
    assert entry_of(tree, "never")["lacks"] == "not run: toy: C is better (no preset has it)"


def test_a_claim_does_not_hold_while_a_study_that_it_rests_on_has_no_result():
    rests_on = {"toy": ["A is*"], "tiny": ["A is*"]}
    claim = PaperClaim(id="wide", statement="a beats b everywhere", decided_by=rests_on)
    paper = Claimed("Someone 2020, A Paper", (claim,))
    remedies = {("tiny", "A is better"): "preset `laptop`: 2 models", **REMEDIES}
    entry = entry_of(ledger({"r.nc": result_with(*CLEAR)}, {"s": paper}, remedies), "wide")
    assert entry["verdict"] == "undecided"
    assert entry["lacks"] == "not run: tiny: A is better (preset `laptop`: 2 models)"
    assert entry["n_parts"] == 2


@pytest.mark.parametrize(
    ("pattern", "lacks"),
    [
        ("A is*", ""),
        ("C is*", "their data; not run: toy: C is better (no preset has it)"),
        ("D is*", "their data"),
    ],
)
def test_the_data_that_a_run_needs_are_named_until_it_was_run(pattern, lacks):
    claim = PaperClaim(
        id="c", statement="on their data", decided_by={"toy": [pattern]}, needs="their data"
    )
    paper = Claimed("Someone 2020, A Paper", (claim,))
    tree = ledger({"r.nc": result_with(*CLEAR)}, {"someone_2020": paper}, {})
    assert entry_of(tree, "c")["lacks"] == lacks


def test_claims_that_no_paper_rests_on_are_listed_apart():
    paper = Claimed("Someone 2020, A Paper", PAPER.claims[2:])
    tree = ledger({"r.nc": result_with(*CLEAR)}, {"someone_2020": paper}, REMEDIES)
    comparisons = tree["comparisons"].to_dataset()
    assert comparisons["paper"].to_numpy().tolist() == [""]
    assert comparisons["statement"].to_numpy().tolist() == ["A is better"]
    page = ledger_page(tree, {"someone_2020": paper.citation})
    assert "## Claims of our own" in page
    assert "| A is better | .3 [" in page


def test_results_of_several_files_count_together():
    results = {"r.nc": result_with(*CLEAR), "s.nc": result_with(*CLEAR[::-1])}
    tree = ledger(results, {"someone_2020": PAPER}, REMEDIES)
    assert entry_of(tree, "first")["verdict"] == "contradicted"
    assert entry_of(tree, "first")["n_holds"] == 1
    assert set(tree["comparisons"]["file"].to_numpy()) == {"r.nc", "s.nc"}


@pytest.mark.parametrize(
    ("some", "first", "second", "verdict"),
    [
        ((), CLEAR, CLEAR[::-1], "contradicted"),
        (["A is*"], CLEAR, CLEAR[::-1], "holds"),
        (["A is*"], CLEAR[::-1], CLEAR[::-1], "contradicted"),
        (["C is*"], CLEAR, CLEAR[::-1], "contradicted"),
    ],
)
def test_of_some_parts_a_single_comparison_is_enough(some, first, second, verdict):
    claim = PaperClaim(id="c", statement="s", decided_by={"toy": ["A is*"]}, some=some)
    results = {"r.nc": result_with(*first), "s.nc": result_with(*second)}
    tree = ledger(results, {"someone_2020": Claimed("Someone 2020, A Paper", (claim,))}, REMEDIES)
    assert entry_of(tree, "c")["verdict"] == verdict
    assert entry_of(tree, "c")["n_comparisons"] == 2


CLOSE = [0.60, 0.70, 0.62], [0.59, 0.63, 0.64]
MORE = [0.80, 0.82, 0.81, 0.80], [0.50, 0.53, 0.51, 0.50]


@pytest.mark.parametrize(
    ("small", "large", "verdict"),
    [
        (CLOSE, MORE, "holds"),
        (CLEAR, [[*side, 0.6] for side in CLOSE], "undecided"),
        (CLEAR[::-1], MORE, "holds"),
        # With as many pairs both count.
        (CLOSE, CLEAR, "undecided"),
        (CLEAR[::-1], CLEAR, "contradicted"),
    ],
)
def test_the_comparison_with_most_pairs_counts(small, large, verdict):
    results = {"small.nc": result_with(*small), "large.nc": result_with(*large)}
    tree = ledger(results, {"someone_2020": PAPER}, REMEDIES)
    assert entry_of(tree, "first")["verdict"] == verdict
    page = ledger_page(tree, {"someone_2020": PAPER.citation})
    superseded = len(large[0]) > len(small[0])
    assert ("(does not count beside large.nc)" in page) == superseded
    assert (f"| `first` a beats b | **{verdict}** | 1 {verdict} |" in page) == superseded


@pytest.mark.parametrize(
    ("draws", "verdict"), [((3, 2), "contradicted"), ((3, 3), "holds"), ((1, 1), "holds")]
)
def test_more_pairs_do_not_count_beside_more_draws_of_the_data(draws, verdict):
    results = {
        "few.nc": result_with(*CLEAR[::-1], draws=draws[0]),
        "many.nc": result_with(*MORE, draws=draws[1]),
    }
    tree = ledger(results, {"someone_2020": PAPER}, REMEDIES)
    assert entry_of(tree, "first")["verdict"] == verdict


@pytest.mark.parametrize(("updates", "verdict"), [(1, "not run"), (2, "not comparable")])
def test_models_that_were_made_to_be_counted_are_not_asked_what_they_learned(updates, verdict):
    result = result_with(*CLEAR)
    result["claims"]["verdict"] = result["claims"]["verdict"].astype("<U20")
    result["claims"]["verdict"][:] = "not comparable"
    result["fairness"]["updates"][:] = updates
    tree = ledger({"counts.nc": result}, {"someone_2020": PAPER}, REMEDIES)
    assert entry_of(tree, "first")["verdict"] == verdict


def test_draws_that_follow_from_the_seed_count():
    many = result_with(*MORE)
    where = {"seed": {str(seed): {"task.seed": seed} for seed in range(4)}}
    many.attrs["config"] = json.dumps(json.loads(many.attrs["config"]) | {"where": where})
    results = {"few.nc": result_with(*CLEAR[::-1], draws=3), "many.nc": many}
    tree = ledger(results, {"someone_2020": PAPER}, REMEDIES)
    assert entry_of(tree, "first")["verdict"] == "holds"


def test_networks_that_were_not_trained_do_not_count_beside_those_that_were():
    many = result_with(*MORE)
    many["claims"]["verdict"] = many["claims"]["verdict"].astype("<U20")
    many["claims"]["verdict"][:] = "not comparable"
    results = {"small.nc": result_with(*CLEAR), "large.nc": many}
    tree = ledger(results, {"someone_2020": PAPER}, REMEDIES)
    assert entry_of(tree, "first")["verdict"] == "holds"


@pytest.mark.parametrize(
    ("rates", "than", "verdict"),
    [
        (3, B, "holds"),
        (1, B, "contradicted"),
        # With a number nothing is compared that was tuned for one side.
        (3, 0.7, "contradicted"),
    ],
)
def test_a_comparison_does_not_count_beside_one_with_more_rates(rates, than, verdict):
    results = {
        "untuned.nc": result_with(*CLEAR[::-1], than=than),
        "tuned.nc": result_with(*CLEAR, than=than, rates=rates),
    }
    tree = ledger(results, {"someone_2020": PAPER}, REMEDIES)
    assert entry_of(tree, "first")["verdict"] == verdict
    superseded = tree["comparisons"]["superseded_by"].to_numpy()[:2].tolist()
    assert superseded == ["tuned.nc" if verdict == "holds" else "", ""]


@pytest.mark.parametrize(("width", "verdict"), [(8, "holds"), (16, "undecided")])
def test_comparisons_are_the_same_if_their_settings_are_whether_varied_or_not(width, verdict):
    results = {"small.nc": result_with(*CLOSE), "large.nc": result_with(*MORE, width=width)}
    tree = ledger(results, {"someone_2020": PAPER}, REMEDIES)
    assert entry_of(tree, "first")["verdict"] == verdict


def test_what_is_undecided_says_the_seeds_and_minutes_that_it_needs():
    result = result_with(*CLOSE)
    tree = ledger({"r.nc": result}, {"someone_2020": PAPER}, REMEDIES)
    needed = int(result["claims"]["seeds_needed"][0])
    comparison = tree["comparisons"].isel(comparison=0)
    # Two models for each missing seed, a minute each, on two cores.
    assert comparison["minutes"].item() == pytest.approx(needed - 3)
    page = ledger_page(tree, {"someone_2020": PAPER.citation})
    time = f"up to {needed} pairs, {needed - 3} min on 2 cores |"
    assert f"| `first` a beats b | **undecided** | 1 undecided | {time}" in page
    assert "| Someone 2020 | 0 | 0 | 2 | 0 | 2 |" in page
    assert "| `data` on their data | **not run** |  | their data |" in page
    assert "not run: toy: C is better" in page
    assert "A is better | .0" in page


@pytest.mark.parametrize(
    ("devices", "machine"), [('["cuda"]', "a GPU"), ('["cpu", "cuda"]', "a GPU and a CPU")]
)
def test_the_time_of_models_is_one_on_their_machines(devices, machine):
    result = result_with(*CLOSE)
    result.attrs["devices_of_training"] = devices
    tree = ledger({"r.nc": result}, {"someone_2020": PAPER}, REMEDIES)
    missing = int(result["claims"]["seeds_needed"][0]) - 3
    page = ledger_page(tree, {"someone_2020": PAPER.citation})
    assert f"pairs, {2 * missing} min on {machine} |" in page


def test_one_seed_and_tiny_differences_are_named():
    tree = ledger({"r.nc": result_with([0.6], [0.5])}, {"someone_2020": PAPER}, REMEDIES)
    assert "more than one pair (1)" in ledger_page(tree, {"someone_2020": PAPER.citation})
    tiny = result_with([0.60, 0.70, 0.62, 0.5], [0.61, 0.69, 0.62, 0.5001])
    tree = ledger({"r.nc": tiny}, {"someone_2020": PAPER}, REMEDIES)
    time = f"over {100 - 4} min on 2 cores"
    page = ledger_page(tree, {"someone_2020": PAPER.citation})
    assert f"more than 100 pairs, {time}: differences too small (1)" in page


def test_a_condition_that_comparisons_share_is_named_once_with_its_longest_training():
    comparisons = pd.DataFrame(
        {
            "verdict": REFUSED * 3,
            "reason": ["A is not trained; no room", "A is not trained", "A is not trained"],
            "updates": [1000, 3000, 2000],
            "n_pairs": [2, 3, 4],
            "pair_minutes": [10.0, 5.0, 20.0],
            "machine": ["2 cores", "a GPU", "2 cores"],
        }
    )
    claim = SimpleNamespace(verdict="not comparable", lacks="")
    longest = "A is not trained after 3,000 updates (twice as many: 30 min on a GPU)"
    assert _needs(claim, comparisons) == f"{longest}; no room"


@pytest.mark.parametrize(("n_files", "verdict"), [(1, "holds"), (3, "undecided")])
def test_verdicts_that_a_correction_over_all_files_leaves_undecided_are_named(n_files, verdict):
    barely = [0.60, 0.64, 0.70], [0.50, 0.50, 0.50]
    results = {f"{width}.nc": result_with(*barely, width=width) for width in range(n_files)}
    tree = ledger(results, {"someone_2020": PAPER}, REMEDIES)
    entry = entry_of(tree, "first")
    assert (entry["verdict"], entry["verdict_over_files"]) == ("holds", verdict)
    page = ledger_page(tree, {"someone_2020": PAPER.citation})
    assert ("over all files of a study" in page) == (verdict == "undecided")
    assert ("would be other ones: `first`." in page) == (verdict == "undecided")


def test_a_file_without_a_comparison_leaves_open_nothing_that_another_decides():
    without = result_with(*CLEAR)
    without["claims"]["verdict"][:] = "not run"
    results = {"r.nc": result_with(*CLEAR[::-1]), "s.nc": without}
    claim = PaperClaim(id="first", statement="s", decided_by={"toy": ["A is*"]}, holds_if="any")
    tree = ledger(results, {"someone_2020": Claimed("Someone 2020, A Paper", (claim,))}, {})
    assert entry_of(tree, "first")["verdict"] == "contradicted"
