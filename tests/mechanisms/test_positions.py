import math
from pathlib import Path

import numpy as np
import pytest
import torch

from mechanisms import RelativePositionBias, relative_buckets, sinusoidal_embedding

GOLDEN = Path(__file__).parents[1] / "golden"
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


def test_fewer_queries_are_the_last_ones():
    arguments = {"n_buckets": 6, "max_distance": 20}
    whole = relative_buckets(10, 10, **arguments)
    assert torch.equal(relative_buckets(3, 10, **arguments), whole[-3:])


def test_sinusoids_agree_with_the_authors():
    theirs = np.load(GOLDEN / "hyla_sinusoidal_32.npz")["pe"]
    assert np.abs(sinusoidal_embedding(40, 32).numpy() - theirs).max() < 1e-5


def test_odd_widths_leave_the_last_channel_empty():
    embedding = sinusoidal_embedding(7, 9)
    assert (embedding[:, 8] == 0).all()
    assert embedding[3, 0] == pytest.approx(math.sin(3))
    assert embedding[3, 4] == pytest.approx(math.cos(3))


def test_too_narrow_for_sinusoids():
    with pytest.raises(ValueError, match=r"at least 4 .* got 3"):
        sinusoidal_embedding(5, 3)
