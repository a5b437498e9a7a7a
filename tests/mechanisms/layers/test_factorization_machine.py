import torch

from mechanisms.layers.factorization_machine import FactorizationMachine


def build(d_in, n_factors):
    generator = torch.Generator().manual_seed(0)
    machine = FactorizationMachine(d_in, n_factors, generator=generator).double()
    with torch.no_grad():
        machine.b.fill_(0.7)
    return machine


def test_it_is_the_sum_over_all_pairs():
    machine = build(5, 3)
    x = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(1)).double()
    values = machine(x)
    assert values.shape == (4, 2)
    w, v = machine.W.tolist(), machine.W_factors.tolist()
    for row, value in zip(x.flatten(0, 1).tolist(), values.flatten().tolist(), strict=True):
        expected = 0.7 + sum(w[i] * row[i] for i in range(5))
        for i in range(5):
            for j in range(i + 1, 5):
                expected += sum(v[i][f] * v[j][f] for f in range(3)) * row[i] * row[j]
        assert abs(value - expected) < 1e-12


def test_a_single_input_has_no_products():
    machine, x = build(1, 4), torch.tensor([[3.0]]).double()
    torch.testing.assert_close(machine(x), 3 * machine.W + machine.b)


def test_both_sums_start_with_about_the_same_variance():
    values = [[], []]
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        machine = FactorizationMachine(64, 8, generator=generator)
        x = torch.randn(200, 64, generator=generator)
        with torch.no_grad():
            first = x @ machine.W
            values[0].append(first.var())
            values[1].append((machine(x) - first).var())
    linear, pairs = (torch.stack(value).mean().item() for value in values)
    assert 0.9 < linear < 1.1
    # Each pair i < j is counted once, hence the half.
    assert 0.4 < pairs < 0.6
