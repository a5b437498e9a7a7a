import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.colors import to_hex
from torch import nn

from probes import hooked, nudge_states, plots, score_halting, score_states, score_steps
from probes.plots import CONTROL
from tests.probes.plots.conftest import batch, legend, lines_of


@pytest.fixture
def answers():
    """Answers that become right, 1, one example after the other."""
    steps, examples = np.arange(4), np.arange(20)[:, None]
    right = examples < 7 * steps
    return xr.DataArray(np.where(right, 1, examples % 5 + 2), dims=("example", "step"))


def test_answers_by_step_have_their_intervals_controls_and_flips(answers, ax):
    targets = xr.DataArray(np.where(np.arange(20) < 15, 1, 0), dims="example")
    scores = score_steps(answers, targets, untrained=answers * 0, resamples=20)
    plots.steps(scores, ax)
    found = lines_of(ax)
    assert list(found) == [
        f"{name}, {scores['flips'].sel(control=name).item():.2g} flips"
        for name in ("observed", "shuffled", "untrained")
    ]
    assert next(iter(found)) == "observed, 1 flips"
    for name, (line, ends) in found.items():
        expected = scores.sel(control=name.split(",")[0])
        assert line.get_xdata().tolist() == [0, 1, 2, 3]
        assert np.allclose(line.get_ydata(), expected["accuracy"])
        bounds = np.stack([expected["accuracy_low"], expected["accuracy_high"]], 1)
        assert np.allclose([ends[x] for x in range(4)], bounds)
    colours = [to_hex(line.get_color()) for line, _ in found.values()]
    assert colours[1:] == [CONTROL] * 2 != colours[:1] * 2
    ax.clear()
    plots.steps(scores, ax, variable="settled")
    line, _ = lines_of(ax)["observed, 1 flips"]
    # All have settled at the end, and those that change at step 3 not before.
    assert line.get_ydata().tolist() == [0.0, 0.35, 0.7, 1.0]


def test_distances_of_states_are_drawn_with_the_tolerance(ax):
    example = np.random.default_rng(0).standard_normal((10, 1, 3))
    states = example * np.array([0.0, 1.0, 2.0, 2.0])[:, None]
    data = xr.DataArray(states, dims=("example", "step", "feature"))
    scores = score_states(data, tolerance=0.05, resamples=20)
    plots.states(scores, ax)
    observed, control = (lines_of(ax)[name][0] for name in ("observed", "shuffled"))
    assert np.allclose(observed.get_xydata(), [[1, 1], [2, 0.5], [3, 0]])
    assert np.allclose(control.get_ydata(), scores["distance"].sel(control="shuffled"))
    (level,) = [line for line in ax.lines if line.get_label() == "the same"]
    assert list(level.get_ydata()) == [0.05, 0.05]
    assert ax.get_ylim()[0] == 0


class Loop(nn.Module):
    """A module that a model which is not ours applies four times; changes grow or vanish."""

    def __init__(self, factor):
        super().__init__()
        self.step = nn.Linear(6, 6, bias=False)
        self.step.weight.data = factor * torch.eye(6)

    def forward(self, x):
        for _ in range(4):
            x = self.step(x).clamp(-1, 1) + x.sign()
        return x


def test_nudges_have_a_line_for_each_step_and_the_untrained_model_is_grey(ax):
    models = {"model": hooked(Loop(0.5)), "untrained": hooked(Loop(0.1))}
    found = nudge_states(**models, inputs=batch(20, 0).inputs, hook="step.hook_out", resamples=20)
    found = found.sel(direction="random")
    plots.nudges(found, ax)
    assert legend(ax)[0] == "as at the nudge"
    assert set(legend(ax)[1:]) == {*(f"nudged at step {step}" for step in range(3)), "untrained"}
    for step in range(3):
        line, ends = lines_of(ax)[f"nudged at step {step}"]
        expected = found.sel(control="trained", nudged=step).isel(step=slice(step, None))
        assert line.get_xdata().tolist() == list(range(step, 4))
        assert np.allclose(line.get_ydata(), expected["growth"])
        assert np.allclose([ends[x][1] for x in range(step, 4)], expected["growth_high"])
    assert line.get_ydata()[0] == pytest.approx(1)
    untrained, _ = lines_of(ax)["untrained"]
    assert to_hex(untrained.get_color()) == CONTROL
    assert np.allclose(untrained.get_ydata(), found["growth"].sel(control="untrained", nudged=0))
    assert ax.get_yscale() == "log"


def test_steps_taken_are_drawn_by_steps_needed_with_their_correlations(answers, ax):
    needed = xr.DataArray(np.arange(20) // 5 + 1, dims="example")
    taken = xr.DataArray(2 * (np.arange(20) // 5) + np.arange(20) % 2, dims="example")
    scores = score_halting(taken, needed, answers=answers, resamples=50)
    plots.halting(scores, ax)
    halting, stays = (line for line, _ in lines_of(ax).values())
    for line, text, rule in zip((halting, stays), legend(ax), scores["rule"].values, strict=True):
        assert line.get_xdata().tolist() == [1, 2, 3, 4]
        assert np.allclose(line.get_ydata(), scores["mean_steps"].sel(rule=rule))
        of_rule = scores.sel(rule=rule, control="observed")
        values = [float(of_rule[f"correlation{end}"]) for end in ("", "_low", "_high")]
        shuffled = float(scores["correlation"].sel(rule=rule, control="shuffled"))
        expected = "{}: {:.2f} [{:.2f}, {:.2f}]\n(shuffled {:.2f})"
        assert text == expected.format(rule, *values, shuffled)


def test_results_of_other_probes_are_refused(ax):
    other = xr.Dataset({"rate": ("site", [1.0])})
    for plot, variable, probe in (
        (plots.steps, "accuracy", "score_steps"),
        (plots.states, "distance", "score_states"),
        (plots.nudges, "growth", "nudge_states"),
        (plots.halting, "mean_steps", "score_halting"),
    ):
        with pytest.raises(KeyError, match=f"must hold '{variable}', made by {probe}, got rate"):
            plot(other, ax)
