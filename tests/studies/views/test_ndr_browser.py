"""Steps through graphs of stored models, compared with graphs and dataflow from other sources."""

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import probes
from studies.engine import read_result
from studies.views import ndr, ndr_browser

STORED = Path(__file__).parents[3] / "studies" / "results" / "ndr_control_flow"


# The second has only models without gates, whose nodes are those that change.
@pytest.fixture(scope="module", params=["models.nc", "gateless.nc"])
def result(request):
    return read_result(STORED / request.param)


@pytest.fixture(scope="module")
def spec(result):
    return ndr_browser.control_flow(result)


def layers(spec):
    flow, (truth, attention) = spec["hconcat"][0], spec["hconcat"][1]["vconcat"]
    return flow["layer"], truth["layer"], attention


def test_the_truth_of_table_lookup_is_a_chain(result):
    directions = result["scores"]["direction"].to_numpy().tolist()
    # The literal is first in forward order, and last in backward order.
    words = ["BOS", "000", "d", "f", "EOS"]
    forward = ndr_browser.true_dataflow(result, directions.index("forward"), words)
    assert forward["edges"].to_numpy().tolist() == [[1, 2], [2, 3], [3, 4]]
    words = ["BOS", "f", "d", "000", "EOS"]
    backward = ndr_browser.true_dataflow(result, directions.index("backward"), words)
    assert sorted(backward["edges"].to_numpy().tolist()) == [[1, 4], [2, 1], [3, 2]]


def test_expressions_of_single_characters_are_read():
    task = {"class": "ArithmeticConfig"}
    result = two_cells({"setup": {"task": task}})
    truth = ndr_browser.true_dataflow(result, 0, ["BOS", "(", "3", "+", "4", ")", "EOS"])
    edges = truth["edges"].to_numpy().tolist()
    assert [2, 3] in edges
    assert [4, 3] in edges


def test_the_truth_is_read_out_where_the_model_is():
    config = {"setup": {"task": {"class": "ArithmeticConfig"}, "readout": "last"}}
    result = two_cells(config, readout=["first", "last"])
    words = ["BOS", "(", "3", "+", "4", ")", "EOS"]
    readouts = [int(ndr_browser.true_dataflow(result, n, words)["readout"]) for n in range(2)]
    assert readouts == [0, len(words) - 1]


def two_cells(config, **axes):
    coordinates = {"cell": ["a", "b"]} | {name: ("cell", values) for name, values in axes.items()}
    result = xr.DataTree.from_dict({"scores": xr.Dataset(coords=coordinates)})
    of_axes = {"coordinates": {name: name for name in axes}}
    result.attrs = {"config": json.dumps(config), "axes": json.dumps(of_axes)}
    return result


def test_reads_are_the_edges_of_the_graphs(result, spec):
    (condition, _, data), *_ = ndr.first_cells(result)
    graphs = ndr.graphs_of(data, "change")
    expected = {
        (*source, *target)
        for source, target, edge in probes.to_networkx(graphs, 1).edges(data=True)
        if edge["kind"] == "attention"
    }
    flow, _, _ = layers(spec)
    name = spec["params"][0]["bind"]["options"][1]
    assert name.startswith(f"{condition.label}, seed 0")
    fields = ("source", "source_step", "pos", "at")
    shown = [row for row in flow[3]["data"]["values"] if row["example"] == name]
    drawn = {tuple(row[field] for field in fields) for row in shown if row["criterion"] == "change"}
    assert drawn == expected
    assert len(drawn) > 5


def test_attention_is_the_chosen_head_or_the_largest(result, spec):
    (_, _, data), *_ = ndr.first_cells(result)
    _, _, attention = layers(spec)
    names = spec["params"][0]["bind"]["options"]
    width = len(data["tokens"][0].item().split())
    rows = {
        (row["head"], row["step"]): row["value"]
        for row in attention["data"]["values"]
        if row["example"] == names[0]
    }
    weights = data["attention"].isel(example=0)
    side = int(np.sqrt(len(rows["head 2", 3])))
    for head, expected in (
        ("head 2", weights[3, 2]),
        (ndr_browser.MAXIMUM, weights[3].max("head")),
    ):
        shown = np.array(rows[head, 3], dtype=float).reshape(side, side)[:width, :width]
        largest = float(weights.isel(query_pos=slice(width), key_pos=slice(width)).max())
        np.testing.assert_allclose(shown * largest / 1000, expected[:width, :width], atol=0.001)


def test_too_many_values_leave_out_heads_and_then_examples(result, monkeypatch):
    everything = list(ndr_browser.examples_of(result))
    widest = max(len(one.tokens) for one in everything)
    size, every = everything[0].data.sizes["step"] * widest**2, len(everything)
    for most, n, heads in (
        (10**9, every, True),
        (every * size, every, False),
        (3 * size, 3, False),
    ):
        monkeypatch.setattr(ndr_browser, "MOST", most)
        kept, with_heads = ndr_browser._fitting(everything)
        assert (len(kept), with_heads) == (n, heads)
