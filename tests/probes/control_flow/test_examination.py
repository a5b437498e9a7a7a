import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from transformer_lens.hook_points import HookPoint

from probes import examine_control_flow, extract_control_flow, score_control_flow
from tests.probes.control_flow.programs import HEADS, ProgramModel, answer_of, make_programs

N = 60


class StatefulModel(ProgramModel):
    """Runs a program, or with `noisy` random gates and reads, and shows its states."""

    def __init__(self, *, noisy=False):
        super().__init__()
        self.noisy = noisy
        for block in self.blocks:
            block.hook_resid_pre, block.hook_resid_post = HookPoint(), HookPoint()
        self.setup()

    def forward(self, args, when, leaf, readout):
        state = leaf[..., None]
        head = torch.arange(HEADS)[:, None, None] == torch.arange(args.shape[-1]) % HEADS
        generator = torch.Generator().manual_seed(0)
        for step, block in enumerate(self.blocks):
            state = block.hook_resid_pre(state)
            weights, gate = args[:, None] * head, (when == step).float()[..., None]
            if self.noisy:
                weights = torch.rand(weights.shape, generator=generator)
                gate = torch.rand(gate.shape, generator=generator) / 10
            pattern = block.attn.hook_pattern(weights)
            gate = block.hook_gate(gate)
            own = (torch.arange(when.shape[1]) != readout[:, None]).float()[..., None]
            update = own + (pattern @ state[:, None]).sum(dim=1)
            state = block.hook_resid_post(gate * update + (1 - gate) * state)
        return state[torch.arange(len(state)), readout, 0]


@pytest.fixture(scope="module")
def programs():
    return make_programs(N)


@pytest.fixture(scope="module")
def truth(programs):
    # The first ten answers are wrong.
    target = programs.answer + (np.arange(N) < 10)
    return programs.truth.assign(valid=programs.valid, target=("example", target))


@pytest.fixture(scope="module")
def result(programs, truth):
    return examine_control_flow(
        StatefulModel(),
        programs.inputs,
        truth,
        untrained=StatefulModel(noisy=True),
        answer=answer_of,
        thresholds={"gate": 0.5, "change": 0.05},
        attention_threshold=0.5,
        batch_size=25,
    )


def test_a_program_is_drawn_and_computed_by_its_gates(result):
    score = result["score"].sel(nodes="gate", depth="all", correct="all")
    trained = score.sel(control="trained", metric=["f1", "order", "tau", "parallelism"])
    np.testing.assert_allclose(trained, 1)
    for control in ("shuffled", "untrained"):
        assert score.sel(control=control, metric="f1") < 0.5
    rate = result["rate"].sel(nodes="gate", outcome="broken")
    assert result["cut"].to_numpy().tolist() == ["one step", "lasting", "lasting, matched"]
    for cut in result["cut"].to_numpy():
        here = rate.sel(cut=cut)
        assert (here.sel(condition=["node on the path", "edge on the path"]) == 1).all()
        assert (here.sel(condition=["node off the path", "no node", "no edge"]) == 0).all()
    reads = result["reads"].sel(nodes="gate")
    distance = abs(
        reads.sel(condition="node off the path") - reads.sel(condition="node on the path")
    )
    assert distance.sel(cut="lasting, matched") < distance.sel(cut="lasting") / 2
    # What becomes wrong was right, so that ten examples are left out.
    assert result["trials"].sel(outcome="broken").max() == N - 10


def test_scores_are_by_depth_and_by_whether_the_answer_is_right(programs, truth, result):
    assert result["nodes"].to_numpy().tolist() == ["gate", "change"]
    assert result["correct"].to_numpy().tolist() == ["False", "True", "all"]
    counts = result["examples"].sel(nodes="gate", control="trained", metric="recall", depth="all")
    assert counts.to_numpy().tolist() == [10, N - 10, N]
    assert "example" not in result.dims
    # As the functions do by themselves.
    dims = ("example", "step", "head", "query_pos", "key_pos")
    pattern = np.broadcast_to(
        (programs.args[:, None] & (np.arange(HEADS)[:, None, None] == np.arange(24) % HEADS))[
            :, None
        ],
        (N, 6, HEADS, 24, 24),
    )
    gates = programs.when[:, None] == np.arange(6)[:, None]
    graphs = extract_control_flow(
        xr.DataArray(gates * 1.0, dims=("example", "step", "pos")),
        xr.DataArray(pattern * 1.0, dims=dims),
        programs.valid,
        attention_threshold=0.5,
    )
    alone = score_control_flow(graphs, truth, by=("depth",))
    for name in ("score", "done"):
        here = result[name].sel(nodes="gate", correct="all", control=alone["control"])
        np.testing.assert_allclose(here, alone[name].transpose(*here.dims))
    assert all(result[name].attrs["long_name"] for name in result.variables)


def without_gates(*, noisy=False):
    model = StatefulModel(noisy=noisy)
    for block in model.blocks:
        block.hook_gate = nn.Identity()
    model.setup()
    return model


def test_a_model_without_gates_is_drawn_and_cut_by_its_states(programs, truth, result):
    arguments = {
        "untrained": without_gates(noisy=True),
        "answer": answer_of,
        "gates": None,
        "attention_threshold": 0.5,
        "batch_size": 25,
    }
    model = without_gates()
    alone = examine_control_flow(
        model, programs.inputs, truth, thresholds={"change": 0.05}, **arguments
    )
    # As states keep what closed gates keep, it is the model with gates.
    assert alone["nodes"].to_numpy().tolist() == ["change"]
    for name in ("score", "rate", "trials"):
        np.testing.assert_array_equal(alone[name], result[name].sel(nodes=["change"]))
    with pytest.raises(ValueError, match=r"thresholds must be of change with gates=None, got"):
        examine_control_flow(model, programs.inputs, truth, thresholds={"gate": 0.5}, **arguments)


def test_the_result_can_be_stored(result, tmp_path):
    result.to_netcdf(tmp_path / "flow.nc", engine="netcdf4")


def test_a_model_without_gates_is_refused(programs, truth):
    class Closed(ProgramModel):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.hook_gate = nn.Identity()
            self.setup()

    with pytest.raises(KeyError, match="hook_gate"):
        examine_control_flow(
            Closed(),
            programs.inputs,
            truth,
            untrained=Closed(),
            answer=answer_of,
            thresholds={"gate": 0.5},
        )
