import math

import pytest
import torch

from mechanisms.attention.alignment import AlignmentConfig
from mechanisms.attention.gated_alignment import GatedAlignment
from mechanisms.attention.quasi import QuasiAttentionConfig

CONFIGS = [AlignmentConfig(), AlignmentConfig(composition=QuasiAttentionConfig(beta=0.2))]


@pytest.mark.parametrize("config", CONFIGS, ids=["softmax", "coda"])
def test_each_number_is_gated_by_all_of_its_token(config):
    generator = torch.Generator().manual_seed(0)
    attend = GatedAlignment(config, 3, 2, generator=generator)
    with torch.no_grad():
        attend.b_G.normal_(generator=generator)
    a, b = torch.randn(2, 4, 3, generator=generator), torch.randn(2, 5, 3, generator=generator)
    masks = torch.ones(2, 4).bool(), torch.ones(2, 5).bool()
    with torch.no_grad():
        pattern, _ = attend.align(a, b, *masks)
        out = attend(a, b, *masks)
    assert out.shape == (2, 4, 6)
    W, bias = attend.W_G.tolist(), attend.b_G.tolist()
    for i in range(2):
        for t in range(4):
            attended = [
                sum(float(pattern[i, t, k] * b[i, k, d]) for k in range(5)) for d in range(3)
            ]
            both = a[i, t].tolist() + attended
            for d in range(6):
                score = bias[d] + sum(both[e] * W[e][d] for e in range(6))
                assert abs(both[d] / (1 + math.exp(-score)) - float(out[i, t, d])) < 1e-5


def test_nothing_to_attend_to_appends_zeros():
    attend = GatedAlignment(AlignmentConfig(), 3, 2)
    a, b = torch.randn(1, 4, 3), torch.randn(1, 5, 3)
    out = attend(a, b, torch.ones(1, 4).bool(), torch.zeros(1, 5).bool())
    assert out.isfinite().all()
    assert out[..., :3].abs().min() > 0
    assert not out[..., 3:].any()
