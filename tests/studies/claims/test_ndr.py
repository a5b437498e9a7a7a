"""Claims about the Neural Data Router: which results they hold for, and which contradict them."""

import numpy as np
import pytest
import xarray as xr

from studies.claims.ndr import learning_steps
from studies.engine.claims import judge
from studies.ndr_control_flow import ARITHMETIC_STUDY, LISTOPS_STUDY, STUDY
from tests.studies.engine.synthetic import result_of

SEEDS = 4
STEPS = np.array([100, 200, 400, 800])
LOOKUP = {
    # Right answers, in percent: forward id and ood, backward id and ood.
    "lstm": (100, 100, 60, 20),
    "dnc": (100, 100, 60, 20),
    "transformer": (80, 15, 80, 15),
    "relative": (80, 25, 80, 15),
    "geometric": (85, 20, 80, 20),
    "relative_gate": (100, 99, 100, 20),
    "relative_own_gate": (100, 26, 100, 14),
    "relative_late_gate": (100, 20, 100, 17),
    "abs_rel_gate": (100, 98, 100, 98),
    "ndr_undirected": (100, 40, 100, 40),
    "ndr": (100, 100, 100, 100),
}
TREES = {"lstm": 70, "transformer": 50, "relative": 75, "abs_rel_gate": 80, "ndr": 98}
HABITS = {
    # Of NDR, and of models that are not asked for: position rather than distance.
    "ndr": {"neighbour": 0.8, "position": 0.9, "offset": 0.2, "sharp": 1.05, "late": 0.2},
    "relative": {"neighbour": 0.3, "position": 0.4, "offset": 0.4, "sharp": 0.2, "late": 0.7},
    "relative_gate": {"neighbour": 0.8, "position": 0.2, "offset": 0.9, "sharp": 1, "late": 0.3},
}
FIRST = 0.3
"""The blur of attention at the first step."""


class AllAlike:
    def objections(self, first, second, *, of_learning=False):
        return ""


def jitter(seed):
    return 0.001 * (seed - (SEEDS - 1) / 2)


def lookup(models=LOOKUP, **changed):
    """A result of table lookup with these right answers in percent."""
    rows = [
        {"model": model, "direction": direction, "seed": seed, "id": right[at] / 100}
        | {"ood": right[at + 1] / 100 + jitter(seed)}
        for model, right in (dict(models) | changed).items()
        for at, direction in ((0, "forward"), (2, "backward"))
        for seed in range(SEEDS)
    ]
    return with_curves(by_depth(result_of(rows)))


def by_depth(tree):
    """A result whose right answers `ood` are those of nine and ten functions, all of eight."""
    scores = tree["scores"].to_dataset()
    eight = xr.where(scores["split"] == "ood", 1.0, np.nan)
    shallow = scores["accuracy"].where(eight.isnull(), (scores["accuracy"] + eight) / 2)
    groups = {"all": shallow, "depth 8": eight * xr.ones_like(scores["accuracy"])}
    groups |= {f"depth {n}": scores["accuracy"] for n in (9, 10)}
    along = xr.concat([one.isel(group=0, drop=True) for one in groups.values()], "group")
    along = along.assign_coords(group=list(groups)).assign_attrs(scores["accuracy"].attrs)
    tree["scores"] = xr.DataTree(scores.drop_dims("group").assign(accuracy=along))
    return tree


def trees(steps=None, **changed):
    """A result of arithmetic or ListOps; steps until a model has learned, 200 for NDR."""
    rows = [
        {"model": model, "seed": seed, "id": 0.99 + jitter(seed), "ood": right / 100 + jitter(seed)}
        for model, right in (TREES | changed).items()
        for seed in range(SEEDS)
    ]
    return with_curves(result_of(rows), {"ndr": 200} | (steps or {}))


def with_curves(tree, steps=None):
    """A result with curves that rise to 1 at a step, or never."""
    scores = tree["scores"].to_dataset()
    learned = np.array([(steps or {}).get(model, 10_000) for model in scores["model"].data])
    curve = np.where(learned[:, None] <= STEPS, 1.0, 0.2)
    training = tree["training"].to_dataset().drop_vars("seconds")
    training["accuracy"] = (
        ("cell", "split", "group", "train_step"),
        np.stack([curve, curve], 1)[:, :, None],
    )
    training["updates"] = ("cell", np.full(len(learned), STEPS[-1]))
    coords = {"split": ["id", "valid"], "group": ["all"], "train_step": STEPS}
    tree["training"] = xr.DataTree(training.assign_coords(coords))
    return tree


def with_reads(tree, **changed):
    """A result of table lookup with what `measures.reads` gives."""
    models = tree["scores"]["model"].to_numpy()
    of = HABITS | {name: HABITS[name] | values for name, values in changed.items()}
    unknown = dict.fromkeys(HABITS["ndr"], np.nan)
    seeds = tree["scores"]["seed"].to_numpy()

    def column(name):
        return np.array([of.get(model, unknown)[name] for model in models]) + jitter(seeds)

    first = np.where(np.isfinite(column("late")), FIRST, np.nan)
    data = xr.Dataset(
        {
            "neighbour": (("cell", "control"), column("neighbour")[:, None]),
            "same": (
                ("cell", "control", "place"),
                np.stack([column("position"), column("offset")], 1)[:, None],
            ),
            "slope": (
                ("cell", "control", "count"),
                np.stack([column("sharp"), column("sharp")], 1)[:, None],
            ),
            "entropy": (
                ("cell", "control", "step"),
                np.stack([first, first, first, column("late")], 1)[:, None],
            ),
        },
        {
            "control": ["trained"],
            "place": ["position", "offset"],
            "count": ["sharp reads", "last step"],
            "step": [1, 2, 3, 4],
        },
    )
    tree["reads"] = xr.DataTree(data)
    return tree


def verdicts(study, tree, beginning):
    """Verdicts by context of the one claim that begins so."""
    claims = [claim for claim in study.claims if claim.statement.startswith(beginning)]
    assert len(claims) == 1, beginning
    found = judge(tree, claims, AllAlike())
    contexts = found["context"].to_numpy().tolist()
    return dict(zip(contexts, found["verdict"].to_numpy().tolist(), strict=True))


def alike(verdict, *contexts):
    return dict.fromkeys(contexts or [""], verdict)


BOTH = ("direction forward", "direction backward")


@pytest.mark.parametrize(
    ("beginning", "contexts", "changed"),
    [
        ("NDR answers more than 95%", BOTH, {"ndr": (100, 90, 100, 90)}),
        ("lstm answers more than 95%", (), {"lstm": (100, 90, 60, 20)}),
        ("lstm answers less than half", (), {"lstm": (100, 100, 100, 55)}),
        ("dnc answers more than 95%", (), {"dnc": (100, 90, 60, 20)}),
        ("transformer answers less than half", BOTH, {"transformer": (90, 60, 90, 60)}),
        ("relative answers less than half", BOTH, {"relative": (90, 60, 90, 60)}),
        ("geometric does not answer 95%", BOTH, {"geometric": (90, 97, 90, 97)}),
        ("relative_gate answers more than 95%", (), {"relative_gate": (100, 80, 100, 20)}),
        ("relative_gate does not answer 95%", (), {"relative_gate": (100, 99, 100, 97)}),
        ("abs_rel_gate answers more than 95%", BOTH, {"abs_rel_gate": (100, 90, 100, 90)}),
        ("Geometric attention without the gate", BOTH, {"ndr": (70, 10, 70, 10)}),
        ("NDR answers deeper expressions better than without", BOTH, {"ndr": (100, 10, 100, 10)}),
        ("A gate that does not see", BOTH, {"relative_own_gate": (100, 40, 100, 40)}),
        ("A gate that cannot skip", BOTH, {"relative_late_gate": (100, 40, 100, 40)}),
        ("Without gates, relative", BOTH, {"relative": (95, 20, 95, 20)}),
    ],
)
def test_accuracy_on_table_lookup(beginning, contexts, changed):
    assert verdicts(STUDY, lookup(), beginning) == alike("holds", *contexts)
    # Differences without spread are decided, too.
    other = verdicts(STUDY, lookup(**changed), beginning)
    assert other == alike("contradicted", *contexts)


def test_what_is_right_in_more_than_half_has_not_solved_the_task():
    tree = lookup(relative_gate=(100, 99, 100, 70))
    assert verdicts(STUDY, tree, "relative_gate does not answer 95%") == alike("holds")
    tree = lookup(geometric=(90, 60, 90, 60))
    assert verdicts(STUDY, tree, "geometric does not answer 95%") == alike("holds", *BOTH)


@pytest.mark.parametrize(
    ("beginning", "changed"),
    [
        ("Backward, NDR's columns read a neighbour", {"ndr": {"neighbour": 0.4}}),
        ("Backward, its read-out column", {"ndr": {"position": 0.2, "offset": 0.9}}),
        ("Backward, the number of NDR's", {"ndr": {"sharp": 0.5}}),
        ("Backward, the last step of NDR's", {"ndr": {"sharp": 1.5}}),
        ("Backward, the read-out column of relative_gate", {"relative_gate": {"offset": 0.1}}),
    ],
)
def test_reads_on_backward_table_lookup(beginning, changed):
    assert verdicts(STUDY, with_reads(lookup()), beginning) == alike("holds")
    other = verdicts(STUDY, with_reads(lookup(), **changed), beginning)
    assert other == alike("contradicted")


@pytest.mark.parametrize("model", ["ndr", "abs_rel_gate"])
def test_gates_open_in_order_backward(model):
    tree = lookup()
    n_cells = tree["scores"].sizes["cell"]
    score = np.zeros((n_cells, 3)) + jitter(tree["scores"]["seed"].to_numpy())[:, None]
    score *= [1, 0, 0]
    score[tree["scores"]["model"].to_numpy() == model, :2] += [0.8, 0.3]
    coords = {"control": ["trained", "shuffled", "untrained"], "metric": ["tau"], "nodes": ["gate"]}
    coords |= {"depth": ["all"], "correct": ["all"]}
    dims = ("cell", "control", "metric", "nodes", "depth", "correct")
    data = {"score": (dims, score[:, :, None, None, None, None])}
    tree["control_flow"] = xr.DataTree(xr.Dataset(data, coords))
    for control in ("shuffled", "untrained"):
        beginning = f"Backward, the gates of {model} open in order: tau x 100 above that of "
        beginning += control
        assert verdicts(STUDY, tree, beginning) == alike("holds")


def test_the_cause_of_a_failure_is_asked_where_there_is_one():
    cause = "Where relative_gate is right"
    fixed, same = {"offset": 0.9, "position": 0.1}, {"offset": 0.1, "position": 0.9}
    for right, reads, verdict in (
        (20, fixed, "holds"),
        (20, same, "contradicted"),
        (80, fixed, "not run"),
    ):
        tree = with_reads(lookup(relative_gate=(100, 99, 100, right)), relative_gate=reads)
        assert verdicts(STUDY, tree, cause) == alike(verdict)


def test_blur_of_attention():
    for beginning in (
        "The attention of relative is more blurred at step 4 than at the first",
        "The attention of relative is more blurred at step 4 than that of NDR",
    ):
        tree = with_reads(lookup())
        assert verdicts(STUDY, tree, beginning) == alike("holds", *BOTH)
        sharp = with_reads(lookup(), relative={"late": 0.1})
        assert verdicts(STUDY, sharp, beginning) == alike("contradicted", *BOTH)


@pytest.mark.parametrize("study", [ARITHMETIC_STUDY, LISTOPS_STUDY], ids=lambda s: s.name)
def test_accuracy_on_trees(study):
    claims = [one for one in study.claims if "table" in one.source and "steps" not in one.statement]
    assert len(claims) == 5 + 4 + 1
    found = judge(trees(), claims, AllAlike())
    assert set(found["verdict"].to_numpy()) == {"holds"}
    worse = trees(ndr=40)
    assert verdicts(
        study, worse, "NDR answers expressions deeper than in training better than l"
    ) == (alike("contradicted"))
    assert verdicts(study, worse, "ndr answers more than 95%") == alike("contradicted")


def test_learning_takes_others_twice_the_steps():
    """NDR learns in 200 steps; the others after 800, or never, which counts as 800."""
    beginning = "{} needs more steps than NDR until 90% of deeper expressions are right, 2 times"
    tree = trees({"lstm": 800, "transformer": 200, "relative": 400})
    expected = {"lstm": "holds", "transformer": "contradicted", "abs_rel_gate": "holds"}
    for model, verdict in expected.items():
        assert verdicts(ARITHMETIC_STUDY, tree, beginning.format(model)) == alike(verdict)
    # NDR after more than half of the training: nobody knows whether the others need twice as many.
    late = trees({"ndr": 600, "lstm": 800, "transformer": 200})
    expected = {
        "lstm": "contradicted",
        "transformer": "contradicted",
        "abs_rel_gate": "not comparable",
    }
    for model, verdict in expected.items():
        assert verdicts(ARITHMETIC_STUDY, late, beginning.format(model)) == alike(verdict)
    steps = learning_steps("valid").values(tree)
    models = tree["scores"]["model"].to_numpy()
    for model, number in (("ndr", 200), ("lstm", 800), ("relative", 400), ("abs_rel_gate", 800)):
        assert 2 ** steps[models == model] == pytest.approx(number)
    assert np.isnan(learning_steps("ood").values(tree)).all()


def test_parts_of_heads_are_claimed_of_ndr_and_of_the_relative_baseline():
    tree = trees()
    models = tree["scores"]["model"].to_numpy()
    best = np.where(models == "ndr", 0.8, 0.2)[:, None, None] + np.zeros((1, 3, 2))
    best[:, 1], best[:, 2] = 0.4, 0.9
    best += jitter(tree["scores"]["seed"].to_numpy())[:, None, None] * np.array([1, 0, 0])[:, None]
    roles = ["argument reads operator", "operator reads result"]
    coords = {"control": ["trained", "others", "untrained"], "role": roles}
    tree["heads"] = xr.DataTree(xr.Dataset({"best": (("cell", "control", "role"), best)}, coords))
    for role in roles:
        ours, baseline = (
            f"{name} has a head whose part is: {role}, more than " for name in ("NDR", "relative")
        )
        assert verdicts(LISTOPS_STUDY, tree, ours + "other") == alike("holds")
        assert verdicts(LISTOPS_STUDY, tree, ours + "untrained") == alike("contradicted")
        assert verdicts(LISTOPS_STUDY, tree, baseline + "other") == alike("contradicted")


@pytest.mark.parametrize(
    ("depth", "length", "expected"),
    [
        (0.7, 0.02, ("holds", "holds")),
        (-0.7, 0.2, ("contradicted", "contradicted")),
        (0.7, -0.2, ("holds", "contradicted")),
    ],
)
def test_steps_go_with_the_depth_of_the_tree_not_with_its_length(depth, length, expected):
    tree = trees()
    slope = np.array([depth, length]) + jitter(tree["scores"]["seed"].to_numpy())[:, None] / 100
    coords = {"control": ["trained"], "predictor": ["depth", "length"]}
    data = {"slope": (("cell", "control", "predictor"), slope[:, None])}
    tree["timing"] = xr.DataTree(xr.Dataset(data, coords))
    for of, verdict in zip(("length", "depth"), expected, strict=True):
        beginning = f"Of operations of the same {of}, "
        assert verdicts(LISTOPS_STUDY, tree, beginning) == alike(verdict)
