import numpy as np
import pytest
import xarray as xr
from scipy.stats import kendalltau

from probes import collapse_columns, extract_control_flow, score_control_flow
from probes.control_flow.metrics import METRICS, Flow, Truth, score_examples
from tests.probes.control_flow.programs import HEADS, STEPS, WIDTH, make_programs

EDGES = ("precision", "recall", "f1")


def program_graphs(programs, seed=1):
    rng = np.random.default_rng(seed)
    return extract_control_flow(programs.gates(rng), programs.attention(rng), programs.valid)


def noise_graphs(programs, seed=2):
    """About as many updates and reads as the program has, anywhere."""
    rng = np.random.default_rng(seed)
    examples = len(programs.args)
    gates = rng.random((examples, STEPS, WIDTH)) < 0.1
    attention = rng.random((examples, STEPS, HEADS, WIDTH, WIDTH)) < 0.05
    dims = ("example", "step", "head", "query_pos", "key_pos")
    return extract_control_flow(
        xr.DataArray(gates * 1.0, dims=("example", "step", "pos")),
        xr.DataArray(attention * 1.0, dims=dims),
        programs.valid,
    )


def score_one(reads, edges, level, *, last=None, used=None, group=None, routes=None, **columns):
    """Scores of one example, whose reads are pairs (target, source), edges (source, target)."""
    width = len(level)
    steps = 1 + max([0, *(last or [])])
    update = np.zeros((1, steps, width), dtype=bool)
    for pos, step in enumerate(last or []):
        update[0, step, pos] = step >= 0
    matrix = np.zeros((1, width, width), dtype=bool)
    for target, source in reads:
        matrix[0, target, source] = True
    true = np.zeros_like(matrix)
    wanted = np.zeros_like(matrix)
    for number, (source, target) in enumerate(edges):
        true[0, target, source] = True
        wanted[0, target, source] = used is None or used[number]
    names = ("readout", "root")
    truth = Truth(true, wanted, np.array([level]), *(np.array([columns.get(n, -1)]) for n in names))
    flow = Flow(matrix, update)
    if group is not None:
        flow, truth = flow.merged(np.array([group])), truth.merged(np.array([group]))
    return dict(
        zip(METRICS, score_examples(flow, truth, routes=routes)[:, 0].tolist(), strict=True)
    )


def test_the_true_program_scores_one_and_shuffled_columns_do_not():
    programs = make_programs(200)
    result = score_control_flow(program_graphs(programs), programs.truth)
    trained = result["score"].sel(control="trained")
    np.testing.assert_allclose(
        trained.sel(metric=[*EDGES, "order", "tau", "parallelism"]), 1, atol=1e-12
    )
    # EOS reads the root at the step after the root's own: steps are counted from 0.
    depth = programs.truth["depth"].to_numpy()
    one = result["example_score"].sel(control="trained")
    np.testing.assert_array_equal(one.sel(metric="root_step"), depth - 1)
    np.testing.assert_array_equal(one.sel(metric="readout_step"), depth)
    # The only edge that is not between values is EOS's reading.
    np.testing.assert_allclose(one.sel(metric="stray"), 1 / programs.args.sum(axis=(1, 2)))
    shuffled = result["score"].sel(control="shuffled")
    assert (shuffled.sel(metric=[*EDGES, "order"]) < 0.4).all()
    assert abs(shuffled.sel(metric="tau")) < 0.05
    assert (result["above_chance_low"].sel(metric=[*EDGES, "order", "tau"]) > 0.5).all()
    np.testing.assert_array_equal(
        result["done_per_step"].sel(control="trained")[:, :4],
        result["operations_per_level"].sel(level=[1, 2, 3, 4]),
    )
    assert all(result[name].attrs["long_name"] for name in result.variables)


def test_noise_is_at_its_chance_level():
    metrics = [*EDGES, "order", "tau", "parallelism"]
    covered, difference = [], []
    for seed in range(30):
        programs = make_programs(60, seed=seed)
        graphs = noise_graphs(programs, seed=1000 + seed)
        result = score_control_flow(graphs, programs.truth, resamples=200, seed=seed)
        chance = result.sel(metric=metrics)
        covered.append((chance["above_chance_low"] <= 0) & (chance["above_chance_high"] >= 0))
        difference.append(chance["above_chance"])
        # Not for want of edges: something is found.
        assert 0.02 < result["score"].sel(control="trained", metric="recall") < 0.3
    # 95% intervals, 30 times: fewer than 24 that hold 0 have a chance of 1e-3.
    assert (np.sum(covered, axis=0) >= 24).all()
    spread = np.std(difference, axis=0) / np.sqrt(30)
    assert (np.abs(np.mean(difference, axis=0)) < 3.5 * spread).all()


def test_half_a_program_is_between():
    programs = make_programs(100)
    rng = np.random.default_rng(0)
    attention = programs.attention(rng)
    kept = xr.DataArray(
        rng.random((100, WIDTH, WIDTH)) < 0.5, dims=("example", "query_pos", "key_pos")
    )
    graphs = extract_control_flow(programs.gates(rng), attention * kept, programs.valid)
    score = score_control_flow(graphs, programs.truth)["score"].sel(control="trained")
    assert score.sel(metric="precision") == 1
    assert 0.4 < score.sel(metric="recall") < 0.6


def test_tau_is_scipys():
    rng = np.random.default_rng(0)
    update = rng.random((60, 5, 9)) < 0.15
    level = rng.integers(-1, 4, (60, 9))
    level[0], level[1] = 2, -1
    none = np.zeros((60, 9, 9), dtype=bool)
    nobody = np.full(60, -1)
    truth = Truth(none, none, level, nobody, nobody)
    tau = score_examples(Flow(none, update), truth, routes=None)[list(METRICS).index("tau")]
    for example in range(60):
        holds = level[example] >= 0
        first = [next((s for s in range(5) if update[example, s, p]), -1) for p in range(9)]
        expected = np.nan  # where scipy warns
        if holds.sum() > 1:
            expected = kendalltau(np.array(first)[holds], level[example][holds]).statistic
        np.testing.assert_allclose(tau[example], expected)
    assert np.isnan(tau[:2]).all()
    assert np.isfinite(tau).sum() > 50


def test_edge_scores_by_hand():
    # Values at 0 (literal), 1 (literal), 2 = f(0, 1), 3 = g(2); a bracket at 4.
    level, edges = [0, 0, 1, 2, -1], [(0, 2), (1, 2), (2, 3)]
    score = score_one([(2, 0), (3, 2), (3, 1), (2, 4), (4, 3)], edges, level)
    assert score["precision"] == pytest.approx(2 / 3)
    assert score["recall"] == pytest.approx(2 / 3)
    assert score["f1"] == pytest.approx(2 / 3)
    assert score["stray"] == pytest.approx(2 / 5)
    # The reverse direction is another edge.
    assert score_one([(0, 2), (1, 2)], edges, level)["f1"] == 0
    # An edge that is not used need not be found, but is not wrong.
    score = score_one([(2, 0), (2, 1)], edges, level, used=[True, False, True])
    assert (score["precision"], score["recall"]) == (1, 0.5)


def test_empty_cases():
    level, edges = [0, 0, 1], [(0, 2), (1, 2)]
    nothing = score_one([], edges, level)
    assert np.isnan(nothing["precision"])
    assert np.isnan(nothing["stray"])
    assert (nothing["recall"], nothing["f1"], nothing["order"]) == (0, 0, 0)
    no_truth = score_one([(1, 0)], [], [0, 0])
    assert np.isnan(no_truth["recall"])
    assert np.isnan(no_truth["order"])
    assert (no_truth["precision"], no_truth["f1"]) == (0, 0)
    single = score_one([], [], [-1, 0, -1], last=[-1, -1, 1], readout=2, root=1)
    assert all(np.isnan(single[name]) for name in (*EDGES, "order", "tau", "parallelism"))
    assert single["readout_step"] == 1
    assert np.isnan(single["root_step"])


def test_order_by_hand():
    level, edges = [0, 1, 2, 1], [(0, 1), (1, 2), (3, 2)]
    # 1 is done at 0, 2 at 1; 3 never: the edge from it is not in order.
    assert score_one([], edges, level, last=[-1, 0, 1, -1])["order"] == pytest.approx(2 / 3)
    # At the same step is not before.
    assert score_one([], edges, level, last=[-1, 1, 1, 0])["order"] == pytest.approx(2 / 3)
    # A literal that is written over later than it was read is not done before.
    assert score_one([], edges, level, last=[2, 0, 1, 0])["order"] == pytest.approx(2 / 3)
    assert score_one([], edges, level, last=[-1, 0, 1, 0])["order"] == 1


def test_parallelism_by_hand():
    chain, flat = [0, 1, 2, 3, 4], [0, 0, 1, 1, 1]
    assert score_one([], [], chain, last=[-1, 1, 3, 4, 7])["parallelism"] == 1
    assert score_one([], [], chain, last=[-1, 2, 2, 2, 2])["parallelism"] == 1 / 4
    assert score_one([], [], chain, last=[-1, 0, 1, -1, -1])["parallelism"] == 2 / 4
    assert score_one([], [], flat, last=[-1, -1, 2, 2, 2])["parallelism"] == 1
    assert score_one([], [], flat, last=[-1, -1, 0, 1, 2])["parallelism"] == pytest.approx(1 / 3)


def test_routes_have_no_direction_and_pass_columns_without_values():
    # [OP at 0, its bracket at 3, arguments at 1 and 2; another operation at 4 with bracket 5.
    level, edges = [1, 0, 0, -1, 2, -1], [(1, 0), (2, 0), (0, 4)]
    reads = [(1, 0), (3, 2), (3, 0)]
    assert score_one(reads, edges, level)["recall"] == 0
    assert score_one(reads, edges, level, routes=0)["recall"] == pytest.approx(1 / 3)
    one = score_one(reads, edges, level, routes=1)
    assert (one["recall"], one["precision"]) == (pytest.approx(2 / 3), 1)
    # 0 - 3 - 5 - 4: two columns between.
    longer = [*reads, (5, 3), (4, 5)]
    assert score_one(longer, edges, level, routes=1)["recall"] == pytest.approx(2 / 3)
    two = score_one(longer, edges, level, routes=2)
    assert two["recall"] == 1
    assert two["precision"] == pytest.approx(3 / 4)  # 2 - 3 - 5 - 4 joins 2 and 4 too
    # Not through a column that holds a value: 1 - 0 - 4 does not join 1 and 4.
    through = score_one([(1, 0), (4, 0)], edges, level, routes=3)
    assert (through["recall"], through["precision"]) == (pytest.approx(2 / 3), 1)
    # A column that reads everything links everything, and precision says so.
    hub = score_one([(3, pos) for pos in (0, 1, 2, 4)], edges, level, routes=1)
    assert (hub["recall"], hub["precision"]) == (1, 0.5)


def test_a_group_is_one():
    level, edges = [1, 0, 0, -1, 2, -1], [(1, 0), (2, 0), (0, 4)]
    group = [0, 1, 2, 0, 4, 4]  # the first column of each group
    # The brackets do the work: 3 reads the arguments, 5 reads 3; both update, 0 and 4 do not.
    reads, last = [(3, 1), (3, 2), (5, 3)], [-1, -1, -1, 0, -1, 1]
    apart = score_one(reads, edges, level, last=last)
    assert (apart["recall"], apart["order"], apart["stray"]) == (0, 0, 1)
    together = score_one(reads, edges, level, last=last, group=group, readout=5, root=0)
    assert [together[name] for name in (*EDGES, "order", "tau", "stray")] == [1, 1, 1, 1, 1, 0]
    assert (together["readout_step"], together["root_step"]) == (1, 0)
    # With routes a bracket of another operation is no way, since it holds that one's value.
    other = [*reads[:2], (5, 1), (5, 2)]
    assert score_one(other, edges, level, group=group, routes=1)["precision"] == pytest.approx(0.5)


def test_groups_of_truth_are_merged():
    programs = make_programs(20)
    graphs = program_graphs(programs)
    group = np.where(programs.valid, np.arange(WIDTH) + 7, -1)
    alone = programs.truth.assign(group=(("example", "pos"), group))
    plain = score_control_flow(graphs, programs.truth)
    assert score_control_flow(graphs, alone)["example_score"].equals(plain["example_score"])
    # EOS as a part of the root: its reading is inside, nothing is stray.
    root, eos = programs.truth["root"].to_numpy(), programs.truth["readout"].to_numpy()
    group = np.full_like(group, -1)
    group[np.arange(20), root] = group[np.arange(20), eos] = 0
    merged = score_control_flow(graphs, programs.truth.assign(group=(("example", "pos"), group)))
    score = merged["score"].sel(control="trained")
    assert score.sel(metric="stray") == 0
    assert score.sel(metric="f1") == 1
    np.testing.assert_array_equal(
        merged["example_score"].sel(control="trained", metric="root_step"),
        programs.truth["depth"],
    )


def test_renaming_columns_is_extracting_from_renamed_arrays():
    programs = make_programs(10)
    rng = np.random.default_rng(3)
    gates, attention = programs.gates(rng), programs.attention(rng)
    order = np.argsort(np.where(programs.valid, rng.random((10, WIDTH)), 2), axis=1, kind="stable")
    which = xr.DataArray(order, dims=("example", "pos"))
    example = xr.DataArray(np.arange(10), dims="example")
    renamed = extract_control_flow(
        gates.isel(example=example, pos=which),
        attention.isel(
            example=example,
            query_pos=which.rename(pos="query_pos"),
            key_pos=which.rename(pos="key_pos"),
        ),
        programs.valid,
    )
    graphs = extract_control_flow(gates, attention, programs.valid)
    flow = Flow(collapse_columns(graphs).to_numpy() > 0, graphs["update"].to_numpy())
    np.testing.assert_array_equal(flow.relabelled(order).update, renamed["update"])
    np.testing.assert_array_equal(flow.relabelled(order).reads, collapse_columns(renamed) > 0)


def test_scores_by_depth_and_correctness():
    programs = make_programs(240)
    right = np.arange(240) % 3 > 0
    good, bad = program_graphs(programs), noise_graphs(programs)
    graphs = good.copy()
    # Wrong answers come from noise: their graphs are replaced.
    wrong = xr.DataArray(~right, dims="example")
    gates = bad["update"].where(wrong, good["update"]) * 1.0
    noise = np.random.default_rng(0).random((240, STEPS, HEADS, WIDTH, WIDTH)) < 0.05
    attention = programs.attention(np.random.default_rng(1))
    graphs = extract_control_flow(gates, attention.where(~wrong, noise), programs.valid)
    truth = programs.truth.assign(correct=("example", right))
    result = score_control_flow(graphs, truth, untrained=bad, by=("depth", "correct"))
    assert result["score"].dims == ("control", "depth", "correct", "metric")
    assert result["control"].to_numpy().tolist() == [
        "trained",
        "shuffled",
        "left neighbour",
        "right neighbour",
        "both neighbours",
        "untrained",
    ]
    depths = [str(d) for d in np.unique(programs.truth["depth"])]
    assert result["depth"].to_numpy().tolist() == [*depths, "all"]
    assert result["correct"].to_numpy().tolist() == ["False", "True", "all"]
    f1 = result["score"].sel(metric="f1", control="trained")
    assert (f1.sel(correct="True") == 1).all()
    assert (f1.sel(correct="False") < 0.4).all()
    # A cell is the mean of its examples.
    chosen = ~right & (programs.truth["depth"].to_numpy() == 2)
    scores = result["example_score"].sel(control="trained", metric="f1")[chosen]
    assert f1.sel(depth="2", correct="False") == pytest.approx(float(scores.mean()))
    assert result["examples"].sel(
        control="trained", depth="2", correct="False", metric="f1"
    ) == int(np.isfinite(scores).sum())
    low, high = (
        result[f"score_{end}"].sel(metric="f1", control="trained", depth="2", correct="False")
        for end in ("low", "high")
    )
    standard_error = float(scores.std(ddof=1)) / np.sqrt(len(scores))
    assert high - low == pytest.approx(2 * 1.96 * standard_error, rel=0.25)
    # The untrained model is the noise.
    alone = score_control_flow(bad, programs.truth)["score"].sel(control="trained")
    everywhere = result["score"].sel(control="untrained", depth="all", correct="all")
    np.testing.assert_allclose(everywhere, alone)


def test_series_are_means_over_the_examples_of_a_depth_and_answer():
    programs = make_programs(40)
    deep = programs.truth["depth"].to_numpy()
    right = np.arange(40) % 2 == 0
    truth = programs.truth.assign(correct=("example", right))
    result = score_control_flow(program_graphs(programs), truth, by=("depth", "correct"))
    assert result["done"].dims == ("control", "step", "depth", "correct")
    assert result["operations"].dims == ("level", "depth", "correct")
    level = programs.truth["level"].to_numpy()
    for depth, correct, chosen in (
        ("2", "True", (deep == 2) & right),
        ("3", "all", deep == 3),
        ("all", "False", ~right),
    ):
        # Counted in the levels themselves; the program does each level in a step of its own.
        by_hand = [(level[chosen] == one).sum() / chosen.sum() for one in (1, 2, 3, 4)]
        of = {"depth": depth, "correct": correct}
        found = result["operations"].sel(of).sel(level=[1, 2, 3, 4])
        np.testing.assert_allclose(found, by_hand)
        done = result["done"].sel(of).sel(control="trained")
        np.testing.assert_allclose(done[:4], by_hand)
        assert (done[4:] == 0).all()
        shuffled = result["done"].sel(of).sel(control="shuffled")
        assert not np.allclose(shuffled[:4], by_hand)
    none = score_control_flow(
        program_graphs(programs),
        truth.assign(correct=("example", deep > 2)),
        by=("depth", "correct"),
    )
    assert none["done"].sel(depth="1", correct="True").isnull().all()
    assert none["operations"].sel(depth="1", correct="True").isnull().all()


def test_cells_without_examples_are_nan(tmp_path):
    programs = make_programs(30)
    deep = programs.truth["depth"].to_numpy() > 2
    truth = programs.truth.assign(correct=("example", deep))
    result = score_control_flow(program_graphs(programs), truth, by=("depth", "correct"))
    assert result["score"].sel(depth="1", correct="True").isnull().all()
    assert (result["examples"].sel(depth="1", correct="True") == 0).all()
    result.to_netcdf(tmp_path / "scores.nc", engine="netcdf4")


def test_the_seed_decides():
    programs = make_programs(20)
    graphs = noise_graphs(programs)
    first, again, other = (
        score_control_flow(graphs, programs.truth, seed=seed) for seed in (0, 0, 1)
    )
    assert first.identical(again)
    assert not first["example_score"].equals(other["example_score"])


def test_invalid_input_is_refused():
    programs = make_programs(5)
    graphs, truth = program_graphs(programs), programs.truth

    def run(changed=truth, **options):
        return score_control_flow(graphs, changed, **options)

    with pytest.raises(KeyError, match="level"):
        run(truth.drop_vars("level"))
    with pytest.raises(KeyError, match="correct"):
        run(by=("correct",))
    with pytest.raises(ValueError, match="edges must hold pairs of columns"):
        run(truth.assign(edges=truth["edges"] + 20))
    with pytest.raises(ValueError, match="edges must have the shape"):
        run(truth.isel(end=[0]))
    with pytest.raises(ValueError, match="edges must join columns that hold a value"):
        run(truth.assign(level=truth["level"] * 0 - 1))
    with pytest.raises(ValueError, match="level must be -1 at columns that are not valid"):
        run(truth.assign(level=truth["level"] * 0))
    with pytest.raises(ValueError, match="level must hold whole numbers, -1 for none, got NaN or"):
        run(truth.assign(level=truth["level"].where(truth["level"] >= 0)))
    with pytest.raises(ValueError, match="readout must name valid columns"):
        run(truth.assign(readout=truth["readout"] + 1))
    with pytest.raises(ValueError, match="used must be boolean"):
        run(truth.assign(used=truth["edges"][..., 0]))
    with pytest.raises(ValueError, match="routes must be None or at least 0"):
        run(routes=-1)
    with pytest.raises(ValueError, match="permutations and resamples"):
        run(permutations=0)
    with pytest.raises(ValueError, match="untrained must have the sizes"):
        run(untrained=graphs.isel(step=slice(2)))
