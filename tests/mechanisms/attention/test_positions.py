import math
from pathlib import Path

import numpy as np
import pytest
import torch

from mechanisms import RelativePositionBias, relative_buckets, rotate, sinusoidal_embedding

GOLDEN = Path(__file__).parents[2] / "golden"
SIZES = [36, 80]


@pytest.mark.parametrize("size", SIZES)
def test_buckets_and_bias_agree_with_the_authors(size):
    data = np.load(GOLDEN / f"hyla_relpos_{size}.npz")
    n_heads, n_buckets = data["table"].shape
    for bidirectional, key in ((False, "bucket"), (True, "bucket_bidirectional")):
        ours = relative_buckets(
            size, size, n_buckets=n_buckets, max_distance=size, bidirectional=bidirectional
        )
        assert np.array_equal(ours, data[key])
    bias = RelativePositionBias(n_heads=n_heads, n_buckets=n_buckets, max_distance=size)
    bias.load_state_dict({"table": torch.tensor(data["table"])})
    assert np.array_equal(bias(size, size).detach(), data["bias"])


def test_buckets_by_hand():
    """Eight buckets up to distance 32: four exact ones, then each a factor of 8^(1/4) wider."""
    buckets = relative_buckets(40, 40, n_buckets=8, max_distance=32)
    edges = [4 * 8 ** (step / 4) for step in range(5)]
    for query in range(40):
        for key in range(40):
            distance = query - key
            if distance < 4:
                expected = max(distance, 0)
            else:
                expected = min(7, 4 + sum(distance >= edge - 1e-6 for edge in edges[1:]))
            assert buckets[query, key] == expected


@pytest.mark.parametrize(
    ("n_buckets", "max_distance"),
    [(32, 128), (16, 16), (20, 80), (9, 50), (19, 256), (36, 512), (54, 512)],
)
def test_buckets_at_borders_are_those_of_the_formula(n_buckets, max_distance):
    """In the last three sizes a distance is exactly on a border, where precision decides."""
    n = np.maximum(np.subtract.outer(np.arange(300), np.arange(300)), 0)
    exact = n_buckets // 2
    ratio = n.astype(np.float32) / exact + np.finfo(np.float32).eps
    with np.errstate(divide="ignore"):
        wide = np.log(ratio) / np.log(max_distance / exact) * (n_buckets - exact)
    expected = np.where(n < exact, n, np.minimum(exact + wide.astype(np.int32), n_buckets - 1))
    ours = relative_buckets(300, 300, n_buckets=n_buckets, max_distance=max_distance)
    assert np.array_equal(ours, expected)


@pytest.mark.parametrize("n_buckets", [16, 256])
def test_the_bias_starts_with_the_stated_deviation(n_buckets):
    """Schug et al. 2024, code: normal with the standard deviation n_buckets^-0.5."""
    n_heads = 40_000 // n_buckets
    table = RelativePositionBias(
        n_heads=n_heads,
        n_buckets=n_buckets,
        max_distance=n_buckets,
        generator=torch.Generator().manual_seed(0),
    ).table
    unit = table.detach().flatten() * n_buckets**0.5
    # Standard errors of 40,000 draws: 0.005 of the mean, 0.0035 of the standard deviation.
    assert abs(unit.mean()) < 0.02
    assert abs(unit.std() - 1) < 0.015
    # It is not truncated: of a normal, 4.6% are beyond two standard deviations.
    assert (unit.abs() > 2).double().mean() == pytest.approx(0.0455, abs=0.005)


def test_fewer_queries_are_the_last_ones():
    arguments = {"n_buckets": 6, "max_distance": 20}
    full = relative_buckets(10, 10, **arguments)
    assert torch.equal(relative_buckets(3, 10, **arguments), full[-3:])


def test_sinusoids_agree_with_the_authors():
    theirs = np.load(GOLDEN / "hyla_sinusoidal_32.npz")["pe"]
    assert np.array_equal(sinusoidal_embedding(40, 32), theirs)


def test_sinusoids_at_large_positions_are_exact_up_to_float32():
    embedding = sinusoidal_embedding(2048, 32).double()
    for position, channel in ((2047, 0), (1999, 3), (1234, 7)):
        angle = position * math.exp(-channel * math.log(1e4) / 15)
        assert embedding[position, channel] == pytest.approx(math.sin(angle), abs=6e-8)
        assert embedding[position, 16 + channel] == pytest.approx(math.cos(angle), abs=6e-8)


def test_odd_widths_leave_the_last_channel_at_zero():
    embedding = sinusoidal_embedding(7, 9)
    assert (embedding[:, 8] == 0).all()
    assert embedding[3, 0] == pytest.approx(math.sin(3))
    assert embedding[3, 4] == pytest.approx(math.cos(3))


def test_too_narrow_sinusoids_are_refused():
    with pytest.raises(ValueError, match=r"at least 4 .* got 3"):
        sinusoidal_embedding(5, 3)


def complex_rotation(x, first):
    """The same in float64: the two halves of the channels are real and imaginary parts."""
    x = np.asarray(x.detach(), dtype=np.float64)
    half = x.shape[-1] // 2
    rotated = np.empty_like(x)
    for position in range(x.shape[1]):
        for channel in range(half):
            number = x[:, position, :, channel] + 1j * x[:, position, :, channel + half]
            number = number * np.exp(1j * (first + position) * 10_000 ** (-channel / half))
            rotated[:, position, :, channel] = number.real
            rotated[:, position, :, channel + half] = number.imag
    return torch.tensor(rotated)


def vectors(n_positions, d_head, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, n_positions, 3, d_head, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("d_head", [2, 6, 16])
@pytest.mark.parametrize("first", [0, 5, 1000])
def test_rotations_are_products_of_complex_numbers(d_head, first):
    x = vectors(7, d_head)
    expected = complex_rotation(x, first)
    assert torch.allclose(rotate(x, first=first), expected, atol=1e-12)
    assert torch.allclose(rotate(x.float(), first=first).double(), expected, atol=1e-5)


def test_rotation_by_hand():
    """With one pair of channels, position p rotates it by p radians."""
    x = torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2)
    expected = torch.tensor([[1, 0], [math.cos(1), math.sin(1)], [math.cos(2), math.sin(2)]])
    assert torch.allclose(rotate(x)[0, :, 0], expected)


def test_rotated_products_depend_on_distance_only():
    q, k = (vectors(1, 8, seed).expand(-1, 12, -1, -1) for seed in (1, 2))

    def scores(first):
        return torch.einsum("bqhd,bkhd->bhqk", rotate(q, first=first), rotate(k, first=first))

    here = scores(0)
    assert torch.allclose(here, scores(500), atol=1e-11)
    assert torch.allclose(here[..., 1:, 1:], here[..., :-1, :-1], atol=1e-12)
    assert not torch.allclose(here[..., 3, 2], here[..., 3, 1], atol=1e-2)


def test_rotations_keep_norms_and_the_first_position():
    x = vectors(50, 6)
    rotated = rotate(x)
    assert torch.allclose(rotated.norm(dim=-1), x.norm(dim=-1), atol=1e-12)
    assert torch.equal(rotated[:, 0], x[:, 0])
    assert torch.allclose(rotate(x[:, -4:], first=46), rotated[:, -4:], atol=1e-12)


def test_a_rotation_in_half_precision_is_exact_up_to_its_rounding():
    x = vectors(2, 8).bfloat16()
    rotated = rotate(x, first=3000)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rotate(x.float(), first=3000).bfloat16())


def test_a_position_bias_trains_after_a_call_in_inference_mode():
    sizes = {"n_heads": 2, "n_buckets": 6, "max_distance": 20}
    bias = RelativePositionBias(**sizes, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        bias(11, 11)
    bias(11, 11).sum().backward()
    assert bias.table.grad.sum() == 2 * 11 * 11


def test_gradients_flow_after_a_call_in_inference_mode():
    x = vectors(9, 10)
    with torch.inference_mode():
        rotate(x)
    leaf = x.clone().requires_grad_()
    rotate(leaf).sum().backward()
    assert leaf.grad.isfinite().all()


def test_odd_widths_are_refused_by_rotate():
    with pytest.raises(ValueError, match=r"d_head must be even for rotary positions, got 5"):
        rotate(vectors(2, 5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_buckets": 1}, "n_buckets must be at least 2 with bidirectional=False, got 1"),
        ({"n_buckets": 3, "bidirectional": True}, "n_buckets must be at least 4 .*got 3"),
        ({"max_distance": 4}, "max_distance must be greater than 4, .* got 4"),
        ({"max_distance": 1}, "max_distance must be greater than 4, .* got 1"),
    ],
)
def test_invalid_bucket_sizes_are_refused(changes, message):
    sizes = {"n_buckets": 8, "max_distance": 16} | changes
    with pytest.raises(ValueError, match=message):
        relative_buckets(3, 3, **sizes)
    with pytest.raises(ValueError, match=message):
        RelativePositionBias(n_heads=1, **sizes)


def test_more_queries_than_keys_are_refused():
    with pytest.raises(ValueError, match="n_query must be at most n_key = 2, got 3"):
        relative_buckets(3, 2, n_buckets=8, max_distance=16)
