import math

import pytest
import torch

from mechanisms.attention.alignment import AlignmentConfig
from mechanisms.attention.bidirectional_connector import BidirectionalConnector
from mechanisms.attention.quasi import QuasiAttentionConfig

CONFIGS = {
    "softmax": AlignmentConfig(),
    "coda": AlignmentConfig(projection="linear", composition=QuasiAttentionConfig(beta=0.5)),
}
WIDTH, FACTORS = 4, 3


def build(config, **options):
    generator = torch.Generator().manual_seed(0)
    connector = BidirectionalConnector(config, WIDTH, FACTORS, generator=generator, **options)
    with torch.no_grad():
        for parameter in connector.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return connector.double()


def sequences():
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(2, n, WIDTH, generator=generator).double() for n in (5, 3))
    mask_a, mask_b = torch.ones(2, 5).bool(), torch.ones(2, 3).bool()
    mask_a[1, 3:], mask_b[1, 1:] = False, False
    return a, b, mask_a, mask_b


def literal_machine(machine, x):
    w, v, n = machine.W.tolist(), machine.W_factors.tolist(), len(x)
    value = machine.b.item() + sum(w[i] * x[i] for i in range(n))
    for i in range(n):
        for j in range(i + 1, n):
            value += sum(v[i][f] * v[j][f] for f in range(FACTORS)) * x[i] * x[j]
    return value


def literal(connector, a, b):
    """The features of two lists of tokens, which are lists of numbers."""
    config, weights = connector.align.config, connector.align.W_F.T.tolist()
    biases, root = connector.align.b_F.tolist(), math.sqrt(WIDTH)

    def project(x):
        values = [
            sum(w * one for w, one in zip(row, x, strict=True)) + bias
            for row, bias in zip(weights, biases, strict=True)
        ]
        return [max(value, 0) for value in values] if config.projection == "relu" else values

    f_a, f_b = [project(x) for x in a], [project(x) for x in b]
    E = [[sum(s * t for s, t in zip(x, y, strict=True)) / root for y in f_b] for x in f_a]
    M_a, M_b = [[0.0] * len(b) for _ in a], [[0.0] * len(a) for _ in b]
    for i, x in enumerate(f_a):
        for j, y in enumerate(f_b):
            if config.composition is None:
                M_a[i][j] = math.exp(E[i][j]) / sum(map(math.exp, E[i]))
                M_b[j][i] = math.exp(E[i][j]) / sum(math.exp(row[j]) for row in E)
            else:
                distance = sum(abs(s - t) for s, t in zip(x, y, strict=True)) / root
                gate = 1 / (1 + math.exp(config.composition.beta * distance))
                M_a[i][j] = M_b[j][i] = math.tanh(E[i][j]) * gate
    features = []
    for M, x, y in ((M_a, a, b), (M_b, b, a)):
        of_side = []
        for weights_of_token, token in zip(M, x, strict=True):
            aligned = [
                sum(w * other[d] for w, other in zip(weights_of_token, y, strict=True))
                for d in range(WIDTH)
            ]
            pairs = list(zip(aligned, token, strict=True))
            of_side.append(
                [
                    literal_machine(connector.concatenation, aligned + token),
                    literal_machine(connector.difference, [s - t for s, t in pairs]),
                    literal_machine(connector.product, [s * t for s, t in pairs]),
                ]
            )
        features.append(of_side)
    return features


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_features_are_those_of_the_literal_formula(config):
    connector, (a, b, mask_a, mask_b) = build(config), sequences()
    with torch.no_grad():
        found = connector(a, b, mask_a, mask_b)
    for i in range(2):
        tokens = a[i][mask_a[i]].tolist(), b[i][mask_b[i]].tolist()
        for features, mask, expected in zip(
            found, (mask_a, mask_b), literal(connector, *tokens), strict=True
        ):
            wanted = torch.tensor(expected).double()
            torch.testing.assert_close(features[i][mask[i]], wanted, rtol=1e-6, atol=1e-6)
            assert not features[i][~mask[i]].any()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_one_side_has_the_features_of_both(config):
    connector, one_sided = build(config), build(config, one_sided=True)
    assert connector.state_dict().keys() == one_sided.state_dict().keys()
    features, nothing = one_sided(*sequences())
    torch.testing.assert_close(features, connector(*sequences())[0])
    assert nothing is None
    names = {name for name, _ in one_sided.named_modules() if "hook" in name}
    assert not any(name.endswith("_b") for name in names)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_without_a_partner_features_are_finite_and_those_of_zeros(config):
    connector, (a, b, mask_a, mask_b) = build(config), sequences()
    mask_b[1] = False
    features, of_b = connector(a, b, mask_a, mask_b)
    zeros = torch.zeros_like(a)
    expected = connector.concatenation(torch.cat([zeros, a], -1))
    torch.testing.assert_close(features[1, :3, 0], expected[1, :3])
    assert not features[1, :3, 2].sub(connector.product.b).any()
    (features.square().sum() + of_b.square().sum()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in connector.parameters())
