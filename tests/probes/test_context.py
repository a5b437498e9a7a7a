"""The loss by the tokens that are seen, against loops and planted losses."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

from probes import loss_by_context, measure_loss_by_context


def label(values):
    return xr.DataArray(np.asarray(values), dims=("window", "pos"))


@pytest.mark.parametrize(
    ("length", "seen"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (11, [1, 2, 4, 8, 11])],
)
def test_it_is_what_a_loop_computes(length, seen):
    rng = np.random.default_rng(length)
    loss, mask = rng.random((30, length)), rng.random((30, length)) < 0.8
    result = loss_by_context(label(loss), label(mask), resamples=20)
    assert result["seen"].to_numpy().tolist() == seen
    for least, most in zip([0, *seen], seen, strict=False):
        group = [
            loss[window, pos]
            for window in range(30)
            for pos in range(length)
            if mask[window, pos] and least < pos + 1 <= most
        ]
        assert result["loss"].sel(seen=most) == pytest.approx(np.mean(group))
        assert result["tokens"].sel(seen=most) == len(group)
    assert np.allclose(result["window_loss"], [loss[n][mask[n]].sum() for n in range(30)])
    assert result["window_tokens"].to_numpy().tolist() == mask.sum(1).tolist()
    assert all(result[name].attrs["long_name"] for name in result)


def test_it_shows_how_far_back_tokens_help():
    pos = np.arange(64)
    rng = np.random.default_rng(0)
    loss = np.where(pos < 16, 5.0, 1.0) + rng.normal(0, 0.1, (50, 64))
    result = loss_by_context(label(loss), label(np.ones((50, 64), bool)))
    assert np.allclose(result["loss"], [5, 5, 5, 5, 5, 1, 1], atol=0.1)
    flat = loss_by_context(label(loss - 4.0 * (pos < 16)), label(np.ones((50, 64), bool)))
    # Where nothing is gained, each interval holds the same mean.
    assert ((flat["loss_low"] < 1.02) & (flat["loss_high"] > 0.98)).all()


def test_windows_are_what_is_resampled():
    """Tokens of a window that agree make no interval narrower."""
    of_window = np.random.default_rng(0).normal(3, 1, (200, 1))
    result = loss_by_context(label(of_window.repeat(16, 1)), label(np.ones((200, 16), bool)))
    width = result["loss_high"] - result["loss_low"]
    assert np.allclose(width, 2 * 1.96 / np.sqrt(200), rtol=0.15)


def test_losses_that_do_not_count_do_not_matter():
    loss, mask = np.ones((4, 4)), np.ones((4, 4), bool)
    mask[:, 3], loss[:, 3] = False, np.nan
    mask[:, 0] = False
    result = loss_by_context(label(loss), label(mask), resamples=10)
    assert np.isnan(result["loss"].sel(seen=1))
    assert result["loss"].sel(seen=[2, 4]).to_numpy().tolist() == [1, 1]
    assert result["window_loss"].to_numpy().tolist() == [2] * 4


def test_invalid_input_is_refused():
    loss, mask = label(np.ones((4, 3))), label(np.ones((4, 3), bool))
    with pytest.raises(ValueError, match=r"loss must have the dims 'window' and 'pos'"):
        loss_by_context(loss.rename(pos="place"), mask)
    with pytest.raises(ValueError, match=r"mask must have the sizes of loss, .*3.* got"):
        loss_by_context(loss, mask[:, :2])
    with pytest.raises(TypeError, match=r"mask must hold bool, got float64"):
        loss_by_context(loss, loss)
    for value in (np.nan, np.inf):
        with pytest.raises(
            ValueError, match=f"loss must be finite where mask is True, got {value}"
        ):
            loss_by_context(loss.where(loss["pos"] > 0, value), mask)
    with pytest.raises(ValueError, match=r"none of them empty"):
        loss_by_context(loss[:0], mask[:0])


@dataclass
class Text:
    """Windows of random tokens; the last token of each does not count."""

    inputs: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def drawn(cls, n, seed, *, length=16, size=12):
        tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, size, (n, length + 1)))
        mask = torch.ones(n, length, dtype=torch.bool)
        mask[:, -1] = False
        return cls(tokens[:, :-1], tokens[:, 1:], mask)


class Knows(nn.Module):
    """Is sure of the next token where it has seen more than so many, and knows nothing before."""

    def __init__(self, known_after, size=12):
        super().__init__()
        self.known_after, self.size = known_after, size
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens):
        sure = 50.0 * nn.functional.one_hot(tokens.roll(-1, 1), self.size)
        sure[:, : self.known_after] = 0
        return self.drop(sure)


def test_it_is_measured_from_where_on_a_model_knows():
    batches, model = [Text.drawn(20, 0), Text.drawn(10, 1)], Knows(4)
    result = measure_loss_by_context(model, batches)
    assert model.training
    assert result.sizes["window"] == 30
    assert np.allclose(result["loss"].sel(seen=[1, 2, 4]), np.log(12))
    assert np.allclose(result["loss"].sel(seen=[8, 16]), 0, atol=1e-6)
    assert result["tokens"].to_numpy().tolist() == [30, 30, 60, 120, 210]
    nothing = measure_loss_by_context(Knows(16), batches)
    assert np.allclose(nothing["loss"], np.log(12))


def test_invalid_batches_are_refused():
    with pytest.raises(ValueError, match="batches must hold at least one batch, got none"):
        measure_loss_by_context(Knows(4), [])
    with pytest.raises(ValueError, match=r"the first two of targets, \(4, 16\), got \(4, 16\)"):
        measure_loss_by_context(nn.Identity(), [Text.drawn(4, 0)])
