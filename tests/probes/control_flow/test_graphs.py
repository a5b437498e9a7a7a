import json
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from probes import (
    collapse_columns,
    extract_control_flow,
    to_networkx,
    write_control_flow,
    write_graphml,
    write_node_link,
)
from tests.probes.control_flow.programs import STEPS, make_programs

GATES = ("example", "step", "pos")
ATTENTION = ("example", "step", "head", "query_pos", "key_pos")


def arrays(seed, examples=4, steps=5, heads=2, width=6):
    """Noise, with NaN wherever a column is padding."""
    rng = np.random.default_rng(seed)
    length = rng.integers(1, width + 1, examples)
    valid = np.arange(width) < length[:, None]
    gates = np.where(valid[:, None], rng.random((examples, steps, width)), np.nan)
    attention = rng.random((examples, steps, heads, width, width)) ** 4
    both = valid[:, :, None] & valid[:, None, :]
    attention = np.where(both[:, None, None], attention, np.nan)
    return (
        xr.DataArray(gates, dims=GATES),
        xr.DataArray(attention, dims=ATTENTION),
        xr.DataArray(valid, dims=("example", "pos")),
    )


def one_gate(values, **options):
    """The updates of one column with these gates, as a text of 0 and 1."""
    gates = xr.DataArray(np.array(values)[None, :, None], dims=GATES)
    attention = xr.DataArray(np.zeros((1, len(values), 1, 1, 1)), dims=ATTENTION)
    valid = xr.DataArray(np.ones((1, 1), dtype=bool), dims=("example", "pos"))
    graphs = extract_control_flow(gates, attention, valid, **options)
    return "".join(str(int(x)) for x in graphs["update"].to_numpy().ravel())


def table(graphs):
    names = ("edge_example", "target_step", "target_pos", "source_step", "source_pos", "head")
    rows = zip(*(graphs[name].to_numpy().tolist() for name in names), strict=True)
    return dict(zip(rows, graphs["weight"].to_numpy().tolist(), strict=True))


def reference(gates, attention, valid, low, high, threshold):
    """The edges by walking through every column, step and head."""
    edges = {}
    examples, steps, width = gates.shape
    for e in range(examples):
        newest = dict.fromkeys(range(width), -1)
        is_open = dict.fromkeys(range(width), False)
        for t in range(steps):
            updated = []
            for i in range(width):
                if not valid[e, i]:
                    continue
                g = gates[e, t, i]
                is_open[i] = bool(g >= high or (is_open[i] and g >= low))
                if not is_open[i]:
                    continue
                updated.append(i)
                edges[e, t, i, newest[i], i, -1] = 1 - g
                for h in range(attention.shape[2]):
                    for j in range(width):
                        weight = attention[e, t, h, i, j]
                        if j != i and valid[e, j] and weight >= threshold:
                            edges[e, t, i, newest[j], j, h] = weight
            for i in updated:
                newest[i] = t
    return edges


@pytest.mark.parametrize("threshold", [0.5, 0.9, (0.3, 0.8)])
def test_graphs_are_those_of_a_slow_walk(threshold):
    gates, attention, valid = arrays(0, examples=12)
    graphs = extract_control_flow(
        gates, attention, valid, gate_threshold=threshold, attention_threshold=0.3
    )
    low, high = threshold if isinstance(threshold, tuple) else (threshold, threshold)
    expected = reference(gates.values, attention.values, valid.values, low, high, 0.3)
    result = table(graphs)
    assert result.keys() == expected.keys()
    assert len(result) > 50
    np.testing.assert_allclose([result[k] for k in expected], list(expected.values()))
    assert graphs.attrs["gate_threshold_low"] == low
    assert all(graphs[name].attrs["long_name"] for name in graphs.variables)


def test_a_known_program_is_recovered_exactly():
    programs = make_programs(300)
    rng = np.random.default_rng(1)
    graphs = extract_control_flow(programs.gates(rng), programs.attention(rng), programs.valid)
    on = programs.when[:, None] == np.arange(STEPS)[:, None]
    np.testing.assert_array_equal(graphs["update"], on)
    np.testing.assert_array_equal(collapse_columns(graphs) > 0, programs.args)
    # What is read was computed when it should have been; literals are read as they came in.
    reads = graphs.isel(edge=graphs["kind"].to_numpy() == "attention")
    assert reads.sizes["edge"] == programs.args.sum()
    e, j = reads["edge_example"].to_numpy(), reads["source_pos"].to_numpy()
    np.testing.assert_array_equal(reads["source_step"], programs.when[e, j])
    # Across chunks the examples stay in order.
    assert (np.diff(graphs["edge_example"]) >= 0).all()


def test_hysteresis_bridges_a_flicker_that_a_constant_splits():
    flicker = [0.1, 0.7, 0.45, 0.6, 0.42, 0.2, 0.45, 0.9]
    assert one_gate(flicker) == "01010001"
    assert one_gate(flicker, gate_threshold=(0.4, 0.5)) == "01111001"
    assert one_gate(flicker, gate_threshold=(0.5, 0.5)) == one_gate(flicker)


def many_gates(logits):
    gates = xr.DataArray(1 / (1 + np.exp(-logits))[None, :, None], dims=GATES)
    steps = gates.sizes["step"]
    attention = xr.DataArray(np.zeros((1, steps, 1, 1, 1)), dims=ATTENTION)
    valid = xr.DataArray(np.ones((1, 1), dtype=bool), dims=("example", "pos"))
    return extract_control_flow(gates, attention, valid, gate_threshold="mixture").attrs


def test_mixture_finds_where_two_known_components_cross():
    rng = np.random.default_rng(0)
    closed, opened = rng.normal(-4, 0.8, 16_000), rng.normal(1, 0.5, 4_000)
    attrs = many_gates(np.concatenate([closed, opened]))
    grid = np.linspace(-4, 1, 5001)
    closed_wins = np.log(4) + norm.logpdf(grid, -4, 0.8) > norm.logpdf(grid, 1, 0.5)
    crossing = grid[closed_wins.argmin()]
    assert attrs["gate_threshold_rule"] == "mixture"
    level = attrs["gate_threshold_high"]
    assert abs(np.log(level / (1 - level)) - crossing) < 0.1
    assert attrs["gate_threshold_low"] == level


RNG = np.random.default_rng(0)
NEARLY_CLOSED = np.concatenate([RNG.normal(-3, 0.05, 500), RNG.normal(-2.6, 0.05, 500)])


@pytest.mark.parametrize(
    ("logits", "why"),
    [
        (RNG.normal(-1, 1, 5000), "Ashman's D"),
        (np.zeros(100), "all gates are equal"),
        (NEARLY_CLOSED, "the means are 0.02"),
    ],
    ids=["one mode", "constant", "nearly closed"],
)
def test_mixture_says_when_there_are_no_two_groups(logits, why):
    with pytest.warns(RuntimeWarning, match=f"do not fall into two groups .{why}"):
        attrs = many_gates(logits)
    assert attrs["gate_threshold_rule"] == "fallback"
    assert attrs["gate_threshold_high"] == 0.5


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    low=st.floats(0.05, 0.9),
    threshold=st.floats(0.01, 0.9),
)
def test_graphs_have_no_cycle_and_no_padded_column(seed, low, threshold):
    gates, attention, valid = arrays(seed, examples=2)
    graphs = extract_control_flow(
        gates, attention, valid, gate_threshold=(low, 0.9), attention_threshold=threshold
    )
    assert (graphs["source_step"] < graphs["target_step"]).all()
    for example in range(2):
        graph = to_networkx(graphs, example)
        assert nx.is_directed_acyclic_graph(graph)
        columns = set(np.flatnonzero(valid[example]))
        assert {pos for pos, _ in graph.nodes} == columns
        # Every update node has what it copies, and is reached from the column's input.
        for pos, step in graph.nodes:
            if step >= 0:
                assert nx.has_path(graph, (pos, -1), (pos, step))


def test_networkx_holds_the_table():
    gates, attention, valid = arrays(3, heads=3)
    graphs = extract_control_flow(gates, attention, valid, attention_threshold=0.2)
    rows = table(graphs)
    seen_several = False
    for example in range(4):
        graph = to_networkx(graphs, example)
        mine = {row[1:]: weight for row, weight in rows.items() if row[0] == example}
        assert graph.graph["example"] == example
        assert set(graph.edges) == {((j, s), (i, t)) for t, i, s, j, _ in mine}
        for (j, s), (i, t), attributes in graph.edges(data=True):
            between = {
                h: w for (t_, i_, s_, j_, h), w in mine.items() if (t_, i_, s_, j_) == (t, i, s, j)
            }
            assert attributes["weight"] == max(between.values())
            assert attributes["heads"] == [h for h in between if h >= 0]
            assert attributes["kind"] == ("copy" if i == j else "attention")
            seen_several |= len(between) > 1
        updates = {node for node, kind in graph.nodes(data="kind") if kind == "update"}
        step, pos = np.nonzero(graphs["update"].to_numpy()[example])
        assert updates == set(zip(pos.tolist(), step.tolist(), strict=True))
        for pos, step in updates:
            assert graph.nodes[pos, step]["gate"] == gates.values[example, step, pos]
    assert seen_several
    with pytest.raises(IndexError, match=r"must be in 0\.\.3, got 4"):
        to_networkx(graphs, 4)


def test_files_give_the_graph_back(tmp_path: Path):
    gates, attention, valid = arrays(3, heads=3)
    graphs = extract_control_flow(gates, attention, valid, attention_threshold=0.2)
    longest = int(valid.to_numpy().sum(axis=1).argmax())
    graph = to_networkx(graphs, longest)
    assert max(len(heads) for *_, heads in graph.edges(data="heads")) > 1

    write_node_link(graph, tmp_path / "graph.json")
    read = nx.node_link_graph(json.loads((tmp_path / "graph.json").read_text()), edges="edges")
    assert nx.utils.graphs_equal(read, graph)

    write_graphml(graph, tmp_path / "graph.graphml")
    read = nx.read_graphml(tmp_path / "graph.graphml")
    place = {name: (at["pos"], at["step"]) for name, at in read.nodes(data=True)}
    read = nx.relabel_nodes(read, place)
    for *_, attributes in read.edges(data=True):
        attributes["heads"] = [int(head) for head in attributes["heads"].split(",") if head]
    assert dict(read.nodes(data=True)) == dict(graph.nodes(data=True))
    assert {(a, b): d for a, b, d in read.edges(data=True)} == {
        (a, b): d for a, b, d in graph.edges(data=True)
    }

    graphs.to_netcdf(tmp_path / "graphs.nc", engine="netcdf4")
    with xr.open_dataset(tmp_path / "graphs.nc", engine="netcdf4") as stored:
        again = to_networkx(stored.load(), longest)
        assert nx.utils.graphs_equal(again, graph)
        assert stored.attrs == graphs.attrs


def test_gates_per_feature_are_averaged_and_dims_may_come_in_any_order():
    gates, attention, valid = arrays(5)
    graphs = extract_control_flow(gates, attention, valid)
    offsets = xr.DataArray([-1e-3, 0.0, 1e-3], dims="d_model")
    wide = (gates.clip(0.01, 0.99) + offsets).transpose("d_model", "pos", "example", "step")
    turned = extract_control_flow(wide, attention.transpose(), valid.transpose())
    np.testing.assert_array_equal(turned["update"], graphs["update"])
    np.testing.assert_allclose(turned["gate"], graphs["gate"], atol=0.011)
    assert table(turned).keys() == table(graphs).keys()


def test_collapsed_to_groups():
    # Column 1 reads 0 and 2 (both heads), 3 reads 1, twice; 4 belongs to no group.
    attention = np.zeros((1, 2, 2, 5, 5))
    attention[0, 0, 0, 1, 0] = 0.4
    attention[0, 0, :, 1, 2] = 0.9, 0.6
    attention[0, :, 0, 3, 1] = 0.7, 0.5
    attention[0, 0, 0, 3, 4] = 0.8
    attention[0, 0, 0, 2, 2] = 1.0
    graphs = extract_control_flow(
        xr.DataArray(np.ones((1, 2, 5)), dims=GATES),
        xr.DataArray(attention, dims=ATTENTION),
        xr.DataArray(np.ones((1, 5), dtype=bool), dims=("example", "pos")),
    )
    expected = np.zeros((5, 5))
    expected[1, 0], expected[1, 2], expected[3, 1], expected[3, 4] = 0.4, 0.9, 0.7, 0.8
    np.testing.assert_array_equal(collapse_columns(graphs)[0], expected)
    groups = xr.DataArray([[1, 1, 0, 0, -1]], dims=("example", "pos"))
    np.testing.assert_array_equal(
        collapse_columns(graphs, groups=groups)[0],
        # 0 = {2, 3} reads 1 = {0, 1} with 0.7, 1 reads 0 with 0.9; 1 -> 0 is inside, 3 -> 4 out.
        [[0, 0.7], [0.9, 0]],
    )
    with pytest.raises(TypeError, match="integers"):
        collapse_columns(graphs, groups=groups * 1.0)
    with pytest.raises(ValueError, match="at least -1"):
        collapse_columns(graphs, groups=groups - 1)
    with pytest.raises(ValueError, match=r"shape \(1, 5\)"):
        collapse_columns(graphs, groups=groups[:, :4])


def test_invalid_input_is_refused():
    gates, attention, valid = arrays(0)
    ones = valid.copy(data=np.ones(valid.shape, dtype=bool))
    with pytest.raises(ValueError, match=r"gates must be in 0\.\.1 at valid columns"):
        extract_control_flow(gates, attention, ones)
    with pytest.raises(ValueError, match="attention must be finite"):
        extract_control_flow(gates.fillna(1.0), attention, ones)
    with pytest.raises(ValueError, match="attention must be finite"):  # while all gates are closed
        extract_control_flow(gates.fillna(0.0) * 0, attention * np.nan, valid)
    with pytest.raises(ValueError, match="gates must have the dims"):
        extract_control_flow(gates.rename(step="layer"), attention, valid)
    with pytest.raises(ValueError, match="attention must have the dims"):
        extract_control_flow(gates, attention.rename(step="layer"), valid)
    with pytest.raises(ValueError, match="4 examples, 5 steps and 6 positions"):
        extract_control_flow(gates, attention.isel(step=slice(4)), valid)
    with pytest.raises(ValueError, match=r"valid must have the shape \(4, 6\)"):
        extract_control_flow(gates, attention, valid[:3])
    with pytest.raises(TypeError, match="valid must be boolean"):
        extract_control_flow(gates, attention, valid.astype(int))
    for threshold in (0.0, 1.5, (0.6, 0.4), float("nan")):
        with pytest.raises(ValueError, match="gate_threshold must be in"):
            extract_control_flow(gates, attention, valid, gate_threshold=threshold)
    with pytest.raises(ValueError, match="'mixture', got 'otsu'"):
        extract_control_flow(gates, attention, valid, gate_threshold="otsu")
    with pytest.raises(ValueError, match="attention_threshold must be positive"):
        extract_control_flow(gates, attention, valid, attention_threshold=0.0)


def test_graphs_of_all_examples_are_written_whole(tmp_path):
    rng = np.random.default_rng(0)
    dims = ("example", "step", "head", "query_pos", "key_pos")
    graphs = extract_control_flow(
        xr.DataArray(rng.random((2, 3, 4)), dims=(*dims[:2], "pos")),
        xr.DataArray(rng.random((2, 3, 1, 4, 4)), dims=dims),
        xr.DataArray(np.ones((2, 4), dtype=bool), dims=("example", "pos")),
    )
    folder = tmp_path / "new" / "graphs"
    written = write_control_flow(graphs, folder, "noise")
    names = [f"noise-{n}.{ending}" for n in (0, 1) for ending in ("json", "graphml")]
    assert [path.name for path in written] == names
    assert sorted(folder.iterdir()) == sorted(written)
    for example in (0, 1):
        text = (folder / f"noise-{example}.json").read_text()
        loaded = nx.node_link_graph(json.loads(text), edges="edges")
        graph = to_networkx(graphs, example)
        assert {(tuple(a), tuple(b)) for a, b in loaded.edges} == set(graph.edges)
        flat = nx.read_graphml(folder / f"noise-{example}.graphml")
        assert set(flat) == {str(node) for node in graph}
