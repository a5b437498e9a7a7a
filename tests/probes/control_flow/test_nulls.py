import numpy as np
import pytest
import xarray as xr

import tasks
from probes import extract_control_flow, score_control_flow
from probes.control_flow.nulls import BESIDE, HABITS, NEIGHBOURS, neighbour_graphs
from tests.probes.control_flow.programs import make_programs


def graphs_without_reads(examples, steps, width, valid=None):
    """Graphs of a model that does nothing."""
    columns, reads = (
        np.zeros((examples, steps, width)),
        np.zeros((examples, steps, 1, width, width)),
    )
    dims = ("example", "step", "pos"), ("example", "step", "head", "query_pos", "key_pos")
    return extract_control_flow(
        xr.DataArray(columns, dims=dims[0]),
        xr.DataArray(reads, dims=dims[1]),
        xr.DataArray(np.ones((examples, width), dtype=bool), dims=("example", "pos"))
        if valid is None
        else valid,
    )


def scores_of(level, edges, steps, **more):
    truth = xr.Dataset(
        {
            "level": (("example", "pos"), np.array([level])),
            "edges": (("example", "edge", "end"), np.array([edges])),
        }
    )
    graphs = graphs_without_reads(1, steps, len(level))
    return score_control_flow(graphs, truth.assign(more), resamples=1)


def test_descriptions_are_the_same_whichever_habit_is_best():
    """Results of several models are joined, and need equal descriptions."""
    left, right = (
        scores_of([-1, 0, 1, 2, -1][::direction], edges, 3)
        for direction, edges in ((1, [(1, 2), (2, 3)]), (-1, [(3, 2), (2, 1)]))
    )
    assert left.attrs["habit"] != right.attrs["habit"]
    for name in left.variables:
        assert left[name].attrs == right[name].attrs, name


@pytest.mark.parametrize("direction", [1, -1])
def test_a_chain_is_drawn_without_a_model(direction):
    # BOS, a literal and three operations with brackets between that hold nothing, EOS.
    level = [-1, 0, 1, -1, 2, 3, -1][::direction]
    last = len(level) - 1
    edges = [(1, 2), (2, 4), (4, 5)]
    edges = [tuple(end if direction == 1 else last - end for end in edge) for edge in edges]
    result = scores_of(level, edges, 3)
    known = "left neighbour" if direction == 1 else "right neighbour"
    assert result.attrs["habit"] == known
    score = result["score"].sel(control=known)
    assert (
        score.sel(metric=["precision", "recall", "f1", "order", "tau", "parallelism"]) == 1
    ).all()
    other = next(name for name in NEIGHBOURS if name != known)
    assert (result["score"].sel(control=other, metric=["f1", "order"]) == 0).all()
    # One of each two reads of a column beside is true; the one over the bracket is not found.
    both = result["score"].sel(control=BESIDE)
    assert both.sel(metric=["precision", "recall"]).to_numpy().tolist() == [0.5, 2 / 3]
    # The model that does nothing is worse than the habit by all of it.
    assert result["above_habit"].sel(metric="recall") == -1
    assert result["above_habit"].sel(metric="f1") == -1


def test_a_tree_is_not():
    # ((1 + 2) * (3 + 4)): each operation is between its arguments.
    level = [0, 1, 0, 2, 0, 1, 0]
    edges = [(0, 1), (2, 1), (1, 3), (5, 3), (4, 5), (6, 5)]
    score = scores_of(level, edges, 7)["score"]
    for control in NEIGHBOURS:
        # Two of the six reads of a neighbour are true, in one direction: 0 -> 1 and 4 -> 5.
        assert score.sel(control=control, metric="precision") == pytest.approx(2 / 6)
        assert score.sel(control=control, metric="recall") == pytest.approx(2 / 6)
    programs = make_programs(100)
    graphs = graphs_without_reads(*programs.valid.shape[:1], 6, programs.valid.shape[1])
    found = score_control_flow(graphs, programs.truth)["score"]
    assert (found.sel(control=list(HABITS), metric="f1") < 0.3).all()


def test_columns_beside_each_other_draw_an_expression_with_all_its_brackets():
    task = tasks.Arithmetic(tasks.ArithmeticConfig(n_train=100, n_id=10, n_valid=10, n_ood=20))
    truth = tasks.column_dataflow(task.batch("ood", 0, 20))
    graphs = graphs_without_reads(20, 6, truth.sizes["pos"], truth["valid"])
    for groups, routes, f1 in ((True, 0, 1.0), (True, None, 2 / 3), (False, 0, None)):
        known = truth if groups else truth.drop_vars("group")
        result = score_control_flow(graphs, known, routes=routes, resamples=1)
        score = result["score"].sel(control=BESIDE)
        # All columns are done at once.
        assert score.sel(metric="order") == 0
        if f1 is None:
            assert score.sel(metric="f1") < 1
        else:
            assert result.attrs["habit"] == BESIDE
            assert score.sel(metric="f1") == pytest.approx(f1)


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_columns_read_in_turn(name):
    rng = np.random.default_rng(0)
    level = rng.integers(-1, 3, (50, 11))
    for steps in (4, 30):
        flow = neighbour_graphs(level, steps, direction=NEIGHBOURS[name])
        for example in range(50):
            holds = [pos for pos in range(11) if level[example, pos] >= 0]
            if name == "right neighbour":
                holds.reverse()
            pairs = set(zip(holds[1:], holds[:-1], strict=True))
            assert set(zip(*map(list, np.nonzero(flow.reads[example])), strict=True)) == pairs
            update = flow.update[example]
            assert update.sum() == len(pairs)
            when = [int(update[:, pos].argmax()) for pos in holds[1:]]
            if steps >= 10:
                assert when == list(range(len(pairs)))
            else:
                assert when == sorted(when)
                assert not pairs or when[0] == 0
                assert max(np.bincount(when), default=0) <= -(-len(pairs) // steps)


def test_groups_are_neighbours_as_a_whole():
    # The operation of level 1 has two columns, on both sides of its argument.
    level, edges = [1, 0, 1, 2], [(1, 0), (0, 3)]
    group = xr.DataArray([[0, -1, 0, -1]], dims=("example", "pos"))
    result = scores_of(level, edges, 4, group=group)
    # Its first column stands for it: right to left, 2 reads the argument, which reads it.
    assert result["score"].sel(control="left neighbour", metric="recall") == 0
    assert result["score"].sel(control="right neighbour", metric="recall") == 0.5
