"""Random numbers of vmapped models, against those that each model draws alone."""

import pytest
import torch
from torch.nn import functional

from mechanisms import independent_draws
from mechanisms.dropout import dropout
from mechanisms.randomness import draw, gumbel_softmax


def several(x):
    """Random numbers of all kinds, in an order."""
    noise = draw(lambda generator: torch.rand(x.shape, generator=generator), x)
    return dropout(x, 0.5, True) + 2 * dropout(x, 0.25, True) + noise + gumbel_softmax(x)


def test_vmapped_models_draw_what_each_draws_alone():
    x = torch.linspace(0, 1, 80).view(2, 40)
    with independent_draws([3, 4], "cpu"):
        together = torch.vmap(several)(x)
    for number, seed in enumerate((3, 4)):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            alone = several(x[number])
        torch.testing.assert_close(together[number], alone)
    assert not torch.allclose(together[0] - x[0], together[1] - x[1])


def test_gradients_pass_beside_the_random_numbers():
    x = torch.ones(2, 40, requires_grad=True)
    with independent_draws([3, 4], "cpu"):
        dropped = torch.vmap(lambda x: dropout(x, 0.5, True))(x)
    dropped.sum().backward()
    torch.testing.assert_close(x.grad, dropped.detach())


def test_what_is_the_same_for_all_models_has_no_independent_draws():
    with (
        independent_draws([3, 4], "cpu"),
        pytest.raises(RuntimeError, match="must depend on the vmapped weights or inputs"),
    ):
        dropout(torch.ones(8), 0.5, True)
    assert dropout(torch.ones(8), 0.5, True).shape == (8,)


@pytest.mark.parametrize("hard", [False, True])
def test_gumbel_softmax_is_torchs(hard):
    scores = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    results = []
    for function in (
        lambda: gumbel_softmax(scores, temperature=0.5, hard=hard),
        lambda: functional.gumbel_softmax(scores, tau=0.5, hard=hard),
    ):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            sample = function()
        (gradient,) = torch.autograd.grad((sample * torch.arange(7.0)).sum(), scores)
        results.append((sample.detach(), gradient))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
