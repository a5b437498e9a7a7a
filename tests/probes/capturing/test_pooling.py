"""Reductions over positions against loops over examples."""

from types import SimpleNamespace

import pytest
import torch

from probes import last_token, masked_mean, span_mean

STATE = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def batch(**inputs):
    return SimpleNamespace(inputs=inputs, latents={"span": torch.tensor([[0, 2], [2, 3], [1, 5]])})


def test_means_leave_out_padding():
    state = STATE.clone()
    state[0, 3:] = torch.nan
    pooled = masked_mean()(state, batch(attention_mask=MASK))
    for example in range(3):
        expected = state[example][MASK[example].bool()].mean(0)
        torch.testing.assert_close(pooled[example], expected)


def test_the_last_token_is_found_with_padding_on_either_side():
    pooled = last_token("mask")(STATE, batch(mask=MASK.bool()))
    torch.testing.assert_close(pooled, STATE[[0, 1, 2], [2, 4, 4]])


def test_a_span_may_be_a_latent_or_a_function_of_the_batch():
    expected = torch.stack([STATE[0, :2].mean(0), STATE[1, 2], STATE[2, 1:].mean(0)])
    torch.testing.assert_close(span_mean("span")(STATE, batch()), expected)
    by_function = span_mean(lambda given: given.latents["span"].numpy())
    torch.testing.assert_close(by_function(STATE, batch()), expected)


@pytest.mark.parametrize(
    ("reduce", "inputs", "error", "message"),
    [
        (masked_mean(), {}, KeyError, r"must have 'attention_mask' .*, got \['span'\]"),
        (masked_mean("m"), {"m": MASK[:, :3]}, ValueError, r"shape .* \(3, 5\), got \(3, 3\)"),
        (last_token("m"), {"m": 0 * MASK}, ValueError, "a position that counts in each example"),
        (span_mean("m"), {"m": MASK}, ValueError, r"span must have shape \(3, 2\), got \(3, 5\)"),
        (span_mean("m"), {"m": [[0, 1], [2, 6], [0, 5]]}, ValueError, r"in 0..5, got 0..6"),
        (span_mean("m"), {"m": [[0, 1], [-1, 2], [0, 5]]}, ValueError, r"in 0..5, got -1..5"),
    ],
)
def test_what_does_not_fit_is_refused(reduce, inputs, error, message):
    with pytest.raises(error, match=message):
        reduce(STATE, batch(**inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_are_not_too_large_for_it(dtype):
    # The sum is more than float16 holds, and their number has more digits than bfloat16.
    state = torch.full((1, 1029, 2), 100.0, dtype=dtype)
    for reduce in (masked_mean(), span_mean(lambda given: [[0, 1029]])):
        pooled = reduce(state, batch(attention_mask=torch.ones(1, 1029)))
        assert pooled.dtype == dtype
        assert pooled.tolist() == [[100, 100]]


def test_means_of_integers_are_floats():
    pooled = masked_mean()(torch.tensor([[[1], [2], [7]]]), batch(attention_mask=MASK[:1, 1:4]))
    assert pooled.tolist() == [[1.5]]
