import networkx as nx
import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from transformer_lens.hook_points import HookPoint

from probes import capture, cut, extract_control_flow, to_networkx
from probes.capturing.quantity import Quantity
from probes.control_flow.cut_cells import Masks, _ancestors, choose_cells
from tests.probes.conftest import SimpleBatch
from tests.probes.control_flow.programs import HEADS, STEPS, ProgramModel, answer_of, make_programs

N = 120
ON = ("node on the path", "edge on the path")
OFF = ("node off the path", "no node", "edge off the path", "no edge")


def graphs_of(model, programs):
    """Captured and extracted, as a study would."""
    dims = ("example", "head", "query_pos", "key_pos")
    data = capture(
        model,
        [SimpleBatch(programs.inputs, {})],
        {
            "gate": Quantity("blocks.*.hook_gate", dims=("example", "pos", "d_model")),
            "attention": Quantity("blocks.*.attn.hook_pattern", dims=dims),
        },
    ).rename(layer="step")
    return extract_control_flow(data["gate"], data["attention"], programs.valid)


def run(programs, *, model=None, graphs=None, **changes):
    model = model or ProgramModel()
    arguments = {
        "readout": programs.truth["readout"],
        "gates": "blocks.*.hook_gate",
        "attention": "blocks.*.attn.hook_pattern",
        "answer": answer_of,
        "targets": torch.from_numpy(programs.answer + 0),
    } | changes
    graphs = graphs_of(model, programs) if graphs is None else graphs
    return cut(model, programs.inputs, graphs, **arguments)


@pytest.fixture(scope="module")
def programs():
    return make_programs(N)


def test_only_cuts_on_the_path_break_the_program(programs):
    result = run(programs)
    # The unpatched model computes what the recursion does.
    assert result["right"].all()
    assert (result["trials"] >= 0.9 * N).all()
    assert (result["rate"].sel(condition=list(ON)) == 1).all()
    assert (result["rate"].sel(condition=list(OFF)) == 0).all()
    trials = int(result["trials"].sel(condition=ON[0], outcome="changed"))
    np.testing.assert_allclose(
        result["rate_low"].sel(condition=ON[0], outcome="changed"),
        0.025 ** (1 / trials),
        atol=1e-6,
    )
    assert result["hit"].dtype == np.int8
    assert all(result[name].attrs["long_name"] for name in result.variables)


def test_what_is_cut_is_what_the_condition_says(programs):
    model = ProgramModel()
    graphs = graphs_of(model, programs)
    result = run(programs, model=model, graphs=graphs, cuts=2)
    step, pos, key = (
        result[name].transpose("example", "condition", "cut").to_numpy()
        for name in ("cut_step", "cut_pos", "cut_key_pos")
    )
    seen = 0
    for example in range(N):
        graph = to_networkx(graphs, example)
        eos = int(programs.truth["readout"][example])
        last = max(s for p, s in graph.nodes if p == eos)
        path = nx.ancestors(graph, (eos, last)) | {(eos, last)}
        for number, condition in enumerate(result["condition"].to_numpy()):
            cells = set(
                zip(step[example, number], pos[example, number], key[example, number], strict=True)
            )
            if (-1, -1, -1) in cells:
                assert (result["hit"][number, :, example] == -1).all()
                continue
            assert len(cells) == 2
            for s, p, k in cells:
                seen += 1
                on = (p, s) in path
                assert programs.valid[example, p]
                reads = any(a == k for (a, _), _ in graph.in_edges((p, s)))
                kind, where = condition.split(" ", 1)
                if kind == "node" or condition == "no node":
                    assert k == -1
                    assert (graph.has_node((p, s)), on) == {
                        "on the path": (True, True),
                        "off the path": (True, False),
                        "node": (False, False),
                    }[where]
                else:
                    assert k != p
                    assert programs.valid[example, k]
                    assert graph.has_node((p, s))
                    assert (reads, on) == {
                        "on the path": (True, True),
                        "off the path": (True, False),
                        "edge": (False, True),
                    }[where]
    assert seen > 8 * N
    assert (result["rate"].sel(condition=list(ON)) == 1).all()
    assert (result["rate"].sel(condition=list(OFF)) == 0).all()


def test_without_attention_nodes_are_cut_alone(programs):
    with_edges, nodes = run(programs), run(programs, attention=None)
    kept = nodes["condition"].to_numpy().tolist()
    assert kept == ["node on the path", "node off the path", "no node"]
    xr.testing.assert_identical(nodes, with_edges.sel(condition=kept))


@pytest.mark.parametrize("cuts", [1, 2])
def test_matched_controls_are_of_columns_that_are_read_as_often(programs, cuts):
    model = ProgramModel()
    graphs = graphs_of(model, programs)
    free, matched = (
        run(programs, model=model, graphs=graphs, cuts=cuts, matched=each) for each in (False, True)
    )
    for condition in ON:
        assert matched.sel(condition=condition).equals(free.sel(condition=condition))
    masks = Masks.of(graphs, programs.truth["readout"].to_numpy())
    n_nearer = 0
    for example in range(N):
        graph = to_networkx(graphs, example)
        times_read = np.zeros(graphs.sizes["pos"])
        for (pos, _), (target, _) in graph.edges():
            times_read[pos] += pos != target
        for condition in ON + OFF:
            column = "cut_pos" if "node" in condition else "cut_key_pos"
            at = {"condition": condition, "example": example}
            cells, reads = (matched.sel(at)[name].to_numpy() for name in (column, "cut_reads"))
            on_path = matched["cut_reads"].sel(at | {"condition": ON["edge" in condition]})
            is_cut = cells >= 0
            assert (reads == np.where(is_cut, times_read[cells], -1)).all()
            rows = slice(example, example + 1)
            candidates = masks.cells(condition, rows, lasting=False)[0].any(0)
            candidates = candidates.any(0) if "edge" in condition else candidates
            if condition in OFF and is_cut.all():
                wanted = on_path.to_numpy().mean()
                distances = abs(times_read - wanted)
                assert distances[cells].min() == distances[candidates].min()
                n_nearer += (
                    distances[cells].mean()
                    < abs(free.sel(at)["cut_reads"].to_numpy() - wanted).mean()
                )
    assert n_nearer > N / 2
    without = matched["cut_reads"].sel(condition=ON[0]) < 0
    assert (matched["cut_reads"].sel(condition=OFF[0]).where(without, -1) == -1).all()
    assert (matched.attrs["cut_matched"], free.attrs["cut_matched"]) == (1, 0)


def random_graphs():
    rng = np.random.default_rng(0)
    gates = rng.random((20, 5, 6))
    attention = rng.random((20, 5, 2, 6, 6)) ** 6
    valid = np.arange(6) < rng.integers(2, 7, 20)[:, None]
    return extract_control_flow(
        xr.DataArray(gates, dims=("example", "step", "pos")),
        xr.DataArray(attention, dims=("example", "step", "head", "query_pos", "key_pos")),
        xr.DataArray(valid, dims=("example", "pos")),
        gate_threshold=0.7,
        attention_threshold=0.3,
    )


def test_columns_are_read_as_often_as_in_networkx():
    graphs = random_graphs()
    found = Masks.of(graphs, np.ones(20, dtype=np.int64)).times_read(slice(5, 20))
    for example in range(5, 20):
        edges = to_networkx(graphs, example).edges()
        expected = [sum(p == pos != q for (p, _), (q, _) in set(edges)) for pos in range(6)]
        assert found[example - 5].tolist() == expected
    assert found.max() > graphs.sizes["step"] - 1


def test_nothing_is_chosen_where_there_is_nothing_to_match():
    cells = np.ones((2, 4, 3), dtype=bool)
    distance = np.array([[1.0, 0.0, 2.0], [np.nan] * 3])
    chosen = choose_cells(cells, 2, np.random.default_rng(0), distance)
    assert chosen[0, :, 1].tolist() == [1, 1]
    assert (chosen[1] == -1).all()


def test_ancestors_are_those_of_networkx():
    graphs = random_graphs()
    found = _ancestors(graphs, np.ones(20, dtype=np.int64))
    several = 0
    for example in range(20):
        graph = to_networkx(graphs, example)
        last = (1, max(step for pos, step in graph.nodes if pos == 1))
        expected = {node for node in nx.ancestors(graph, last) | {last} if node[1] >= 0}
        step, pos = np.nonzero(found[example])
        assert set(zip(pos.tolist(), step.tolist(), strict=True)) == expected
        several += 1 < len(expected) < graphs["update"].to_numpy()[example].sum()
    assert several > 5


class Ignoring(ProgramModel):
    """Draws the control flow, to which its answer gives the weight 0."""

    def forward(self, args, when, leaf, readout):
        return leaf.sum(dim=1) + 0 * super().forward(args, when, leaf, readout)


def test_a_drawing_that_is_not_used_breaks_nothing(programs):
    model = Ignoring()
    result = run(programs, model=model, targets=torch.from_numpy(programs.leaf.sum(axis=1)))
    assert result["right"].all()
    assert (result["rate"] == 0).all()


class OneCore(ProgramModel):
    """All steps have the same hook points."""

    def __init__(self, steps=STEPS):
        super().__init__(1)
        self.blocks = nn.ModuleList([self.blocks[0]] * steps)
        self.setup()


@pytest.mark.parametrize("lasting", [False, True])
def test_one_hook_that_fires_in_each_step_is_cut_like_one_for_each(programs, lasting):
    graphs = graphs_of(ProgramModel(), programs)
    core = {"gates": "blocks.0.hook_gate", "attention": "blocks.0.attn.hook_pattern"}
    one = run(programs, model=OneCore(), graphs=graphs, lasting=lasting, **core)
    assert one.identical(run(programs, graphs=graphs, lasting=lasting))


class Repeating(ProgramModel):
    """Computes a column again at every step after its first, to the same result."""

    def forward(self, args, when, leaf, readout):
        state = leaf[..., None]
        head = torch.arange(HEADS)[:, None, None] == torch.arange(args.shape[-1]) % HEADS
        for step, block in enumerate(self.blocks):
            pattern = block.attn.hook_pattern(args[:, None] * head)
            begun = ((when >= 0) & (when <= step)).float()[..., None]
            gate = block.hook_gate(begun)
            own = (torch.arange(when.shape[1]) != readout[:, None]).float()
            update = own[..., None] + (pattern @ state[:, None]).sum(dim=1)
            state = gate * update + (1 - gate) * state
        return state[torch.arange(len(state)), readout, 0]


def test_a_network_that_recomputes_recovers_from_all_but_lasting_cuts(programs):
    # The graph of what is computed first: the program's own, not that of the open gates.
    graphs = graphs_of(ProgramModel(), programs)
    # Until the last step there is time to recover from a cut in a shallow expression.
    early = (programs.truth["depth"] < STEPS - 2).to_numpy()
    assert early.any()
    once = run(programs, model=Repeating(), graphs=graphs)
    hit = once["hit"].sel(outcome="changed", condition="node on the path")[early]
    assert (hit == 0).mean() > 0.9
    lasting = run(programs, model=Repeating(), graphs=graphs, lasting=True)
    assert lasting["right"].all()
    assert (lasting["rate"].sel(condition=list(ON)) == 1).all()
    assert (lasting["rate"].sel(condition=list(OFF)) == 0).all()
    assert (lasting["trials"] >= 0.9 * N).all()
    # The same cells, cut once, where the gates do close: no later node is reached.
    plain = run(programs, graphs=graphs, lasting=True)
    assert (plain["rate"].sel(condition=list(OFF)) == 0).all()


class WithoutGates(ProgramModel):
    """Shows its states, before and after each step, and no gates."""

    def __init__(self, in_place=False):
        super().__init__()
        self.in_place = in_place
        for block in self.blocks:
            block.hook_gate = nn.Identity()
            block.before, block.after = HookPoint(), HookPoint()
        self.setup()

    def forward(self, args, when, leaf, readout):
        state = leaf[..., None].clone()
        head = torch.arange(HEADS)[:, None, None] == torch.arange(args.shape[-1]) % HEADS
        own = (torch.arange(when.shape[1]) != readout[:, None]).float()[..., None]
        for step, block in enumerate(self.blocks):
            state = block.before(state)
            pattern = block.attn.hook_pattern(args[:, None] * head)
            update = own + (pattern @ state[:, None]).sum(dim=1)
            computed = torch.where((when == step)[..., None], update, state)
            state = block.after(state.copy_(computed) if self.in_place else computed)
        return state[torch.arange(len(state)), readout, 0]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("lasting", [False, True])
def test_a_column_without_gate_keeps_its_state(programs, lasting, in_place):
    graphs, model = graphs_of(ProgramModel(), programs), WithoutGates(in_place)
    states = ("blocks.*.before", "blocks.*.after")
    result = run(programs, model=model, graphs=graphs, gates=states, lasting=lasting)
    assert result.identical(run(programs, graphs=graphs, lasting=lasting))


def test_metrics_say_how_much_an_output_changes():
    # Without a second tree, there is nothing off the path to cut.
    programs = make_programs(40, second_tree=False)
    graphs = graphs_of(ProgramModel(), programs)
    targets = torch.from_numpy(programs.answer).float()
    metrics = {
        "answer": lambda output, rows: output,
        "error": lambda output, rows: (output - targets[rows]).abs(),
    }
    result = run(programs, graphs=graphs, metrics=metrics, batch_size=15)
    change = result["example_change"]
    # Where the whole-number answer changes, so does the error; elsewhere both are zero.
    assert ((change.sel(metric="error") > 0) == (result["hit"].sel(outcome="changed") == 1)).all()
    untried = (result["hit"].sel(outcome="changed") == -1).to_numpy()
    assert untried.any()
    assert (np.isnan(change.sel(metric="error")) == untried).all()
    np.testing.assert_allclose(result["change"], change.mean("example"))
    assert (result["change_low"].sel(condition=list(ON), metric="error") > 0).all()
    error = result["value"].sel(metric="error")
    np.testing.assert_allclose(error, result["change"].sel(metric="error"), atol=1e-6)
    alone = run(programs, graphs=graphs, metrics=metrics, answer=None, targets=None)
    assert "rate" not in alone
    assert alone["example_change"].equals(change)


def test_examples_without_such_a_cell_are_left_out():
    alone = make_programs(40, second_tree=False)
    result = run(alone)
    off = result.sel(condition=["node off the path", "edge off the path"])
    assert (off["hit"] == -1).all()
    assert off["rate"].isnull().all()
    assert (off["trials"] == 0).all()
    assert (off["cut_step"] == -1).all()
    assert (result["rate"].sel(condition=list(ON)) == 1).all()
    # More cuts than there are cells at all.
    assert (run(alone, cuts=10_000)["hit"] == -1).all()


def test_broken_asks_only_examples_that_were_right(programs):
    targets = torch.from_numpy(programs.answer + np.arange(N) % 2)
    result = run(programs, targets=targets)
    assert result["right"].to_numpy().tolist() == [True, False] * (N // 2)
    hit = result["hit"].sel(condition="node on the path")
    assert hit.sel(outcome="changed").to_numpy().tolist() == [1] * N
    assert hit.sel(outcome="broken").to_numpy().tolist() == [1, -1] * (N // 2)


def test_batches_do_not_matter_and_the_seed_does(programs):
    first = run(programs, batch_size=N)
    assert first.identical(run(programs, batch_size=7))
    assert not first["cut_pos"].equals(run(programs, seed=1)["cut_pos"])


def test_a_second_way_is_measured(programs):
    """A copy of the literals' sum decides half of the answer: the rate is a half, not 1."""

    class Half(ProgramModel):
        def forward(self, args, when, leaf, readout):
            run = super().forward(args, when, leaf, readout)
            return torch.where(torch.arange(len(run)) % 2 == 0, run, leaf.sum(dim=1))

    rate = run(programs, model=Half(), batch_size=N)["rate"]
    assert rate.sel(condition=ON[0], outcome="changed") == 0.5


def test_invalid_input_is_refused(programs):
    graphs = graphs_of(ProgramModel(), programs)
    with pytest.raises(ValueError, match=f"gates must match one hook per step, {STEPS} in the"):
        run(programs, model=ProgramModel(STEPS + 1), graphs=graphs)
    with pytest.raises(ValueError, match="attention must match one hook per step"):
        run(programs, graphs=graphs, attention="blocks.0.attn.hook_pattern")
    with pytest.raises(KeyError, match=r"blocks\.1\.hook_gate"):
        run(programs, graphs=graphs, gates="blocks.*.hook_gates")
    with pytest.raises(ValueError, match="inputs must have the 60 examples"):
        run(programs, graphs=graphs.isel(example=slice(60)))
    with pytest.raises(ValueError, match=r"targets must have the shape \(120,\)"):
        run(programs, graphs=graphs, targets=torch.zeros(3))
    with pytest.raises(ValueError, match="readout must name valid columns"):
        run(programs, graphs=graphs, readout=programs.truth["readout"] + 1)
    with pytest.raises(ValueError, match="cuts and batch_size must be at least 1"):
        run(programs, graphs=graphs, cuts=0)
    with pytest.raises(TypeError, match="integers"):
        run(programs, graphs=graphs, answer=lambda output: output)
    with pytest.raises(TypeError, match=r"targets must hold integers, got torch.float32"):
        run(programs, graphs=graphs, targets=torch.zeros(120))
    with pytest.raises(ValueError, match="one number per example"):
        run(programs, graphs=graphs, answer=lambda output: answer_of(output)[:, None])
    with pytest.raises(ValueError, match="answer and targets must be passed together, or metrics"):
        run(programs, graphs=graphs, targets=None)
    with pytest.raises(ValueError, match=r"metrics\['sum'\] must return a tensor \[120 examples\]"):
        run(programs, graphs=graphs, metrics={"sum": lambda output, rows: output.sum()})
    # Patterns are no gates.
    with pytest.raises(ValueError, match="must have the shape"):
        run(programs, graphs=graphs, gates="blocks.*.attn.hook_pattern")


def test_hooks_are_gone_after_an_error(programs):
    model = ProgramModel().train()
    graphs = graphs_of(model, programs)

    def fail(output):
        raise ArithmeticError("in the answer")

    with pytest.raises(ArithmeticError):
        run(programs, model=model, graphs=graphs, answer=fail)
    assert not model.list_hooks()
    assert model.training
