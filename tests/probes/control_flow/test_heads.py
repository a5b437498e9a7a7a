import numpy as np
import pytest
import xarray as xr

from probes import score_heads
from probes.control_flow.heads import ROLES
from tasks import ListOps, ListOpsConfig, TableLookup, TableLookupConfig, column_dataflow

DIMS = ("example", "step", "head", "query_pos", "key_pos")
STEPS, HEADS = 4, 5
FEW = {"n_id": 40, "n_valid": 30, "n_ood": 30}
NAMES = list(ROLES)


@pytest.fixture(scope="module")
def truth():
    config = ListOpsConfig(
        n_train=120, train_depth=3, valid_depths=(4, 4), ood_depths=(5, 5), **FEW
    )
    return column_dataflow(ListOps(config, cache=None).batch("id", 0, 40))


def pairs_by_hand(truth, example):
    """Queries and keys of each role, from lists."""
    edges = [tuple(e) for e in truth["edges"].values[example].tolist() if e != [-1, -1]]
    *edges, last = edges
    value = truth["value"].values[example].tolist()
    arguments = {}
    for argument, operation in edges:
        arguments.setdefault(operation, []).append(argument)
    results = []
    for operation, own in arguments.items():
        same = [a for a in own if value[a] == value[operation]]
        if 0 < len(same) < len(own):
            results += [(operation, a) for a in same]
    return {
        NAMES[0]: [(o, a) for a, o in edges],
        NAMES[1]: edges,
        NAMES[2]: results,
        NAMES[3]: [(last[1], last[0])],
    }


def planted(truth, weight=0.8):
    """Head r plays role r at step r, and attends to nothing else; the last head is noise."""
    n, width = truth["level"].shape
    attention = np.zeros((n, STEPS, HEADS, width, width))
    for example in range(n):
        for number, pairs in enumerate(pairs_by_hand(truth, example).values()):
            for query, key in pairs:
                attention[example, number, number, query, key] = weight
    noise = np.random.default_rng(0).random((n, STEPS, width, width))
    attention[:, :, -1] = noise / noise.sum(-1, keepdims=True)
    return xr.DataArray(attention, dims=DIMS)


def test_planted_heads_have_their_roles(truth):
    scores = score_heads(planted(truth), truth, resamples=50)
    trained = scores["score"].sel(control="trained")
    others = scores["score"].sel(control="others")
    for number, role in enumerate(NAMES):
        assert float(trained.sel(role=role, head=number)) == pytest.approx(0.8)
        assert float(others.sel(role=role, head=number)) == pytest.approx(0)
        assert int(scores["at_step"].sel(role=role, head=number).argmax("step")) == number
        assert float(scores["at_step"].sel(role=role, head=number, step=number)) == pytest.approx(
            0.8
        )
        assert float(scores["best"].sel(control="trained", role=role)) == pytest.approx(0.8)
    # The pairs of role 2 are some of those of role 0.
    share = float(scores["pairs"][2] / scores["pairs"][0])
    assert float(trained.sel(role=NAMES[0], head=2)) == pytest.approx(0.8 * share)
    assert float(trained.sel(role=NAMES[2], head=0)) == pytest.approx(0.8)
    # A head that reads all arguments alike does not know the result.
    assert float(others.sel(role=NAMES[2], head=0)) == pytest.approx(0.8)
    assert float(trained.sel(role=NAMES[1], head=0)) == 0


def test_noise_has_no_role(truth):
    scores = score_heads(planted(truth), truth, untrained=planted(truth, 0.1), resamples=200)
    noise = scores.sel(head=HEADS - 1)
    for role in NAMES[:3]:
        low, high = (
            float(noise[f"score_{end}"].sel(control="others", role=role)) for end in ("low", "high")
        )
        value = float(noise["score"].sel(control="trained", role=role))
        assert low - 0.02 < value < high + 0.02
    assert float(scores["best"].sel(control="untrained", role=NAMES[3])) == pytest.approx(0.1, 0.5)


def test_scores_are_means_over_the_pairs_by_hand(truth):
    generator = np.random.default_rng(1)
    n, width = truth["level"].shape
    attention = xr.DataArray(generator.random((n, STEPS, HEADS, width, width)), dims=DIMS)
    scores = score_heads(attention, truth, resamples=0)
    largest = attention.max("step").to_numpy()
    for role in NAMES:
        found = np.array(
            [
                largest[example, :, query, key]
                for example in range(n)
                for query, key in pairs_by_hand(truth, example)[role]
            ]
        )
        assert int(scores["pairs"].sel(role=role)) == len(found)
        score = scores["score"].sel(control="trained", role=role)
        np.testing.assert_allclose(score, found.mean(0))
    # The first example's root, among all that it could be mistaken for.
    one = truth.isel(example=[0])
    valid, root, readout = (one[name].values[0] for name in ("valid", "root", "readout"))
    keys = [k for k in np.flatnonzero(valid) if k not in (root, readout)]
    others = score_heads(attention[:1], one, resamples=0)["score"].sel(control="others")
    np.testing.assert_allclose(others.sel(role=NAMES[3]), largest[0][:, readout, keys].mean(1))


def test_a_lookup_has_no_choice_of_arguments():
    task = TableLookup(TableLookupConfig(n_compositions=300, **FEW))
    truth = column_dataflow(task.batch("id", 0, 20))
    scores = score_heads(planted(truth), truth, resamples=0)
    assert int(scores["pairs"].sel(role="operator reads result")) == 0
    missing = scores.sel(role="operator reads result")
    assert bool(missing["score"].isnull().all())
    assert bool(missing["best"].isnull().all() & missing["at_step"].isnull().all())
    reads_root = scores["score"].sel(control="trained", role="readout reads root", head=3)
    assert float(reads_root) == pytest.approx(0.8)


def test_attention_of_padding_does_not_count(truth):
    valid = truth["valid"]
    pairs = valid.rename(pos="query_pos") & valid.rename(pos="key_pos")
    assert not pairs.all()
    padded = planted(truth).where(pairs)
    scores = score_heads(padded, truth, untrained=padded, resamples=10)
    plain = planted(truth).where(pairs, 0.0)
    xr.testing.assert_identical(scores, score_heads(plain, truth, untrained=plain, resamples=10))


def test_wrong_data_gets_a_clear_error(truth):
    attention = planted(truth)
    with pytest.raises(ValueError, match="attention must be finite between valid columns"):
        score_heads(attention * np.nan, truth)
    with pytest.raises(ValueError, match="untrained must be finite between valid columns"):
        score_heads(attention, truth, untrained=attention * np.nan)
    with pytest.raises(KeyError, match="truth must hold value, got"):
        score_heads(attention, truth.drop_vars("value"))
    with pytest.raises(ValueError, match="attention must have the sizes"):
        score_heads(attention[:3], truth)
    with pytest.raises(ValueError, match="attention must have the dims"):
        score_heads(attention[0], truth)
    with pytest.raises(ValueError, match="untrained must have the shape"):
        score_heads(attention, truth, untrained=attention[:, :2])
