"""Interventions at hooks whose value nothing reads are refused, and only these."""

import pytest
import torch
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from probes import At, Vector, align, erase, hooked, interchange
from probes.interventions.swaps import Swaps

N, D = 20, 4


class Attention(nn.Module):
    """Returns its weights beside what it computes with them."""

    def forward(self, x):
        weights = x.softmax(-1)
        return weights * x, weights


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return x + self.attention(x)[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x):
        return self.layer(x)


class Reading(HookedRootModule):
    """Its answer is that of a function of the hooked value, and of the inputs."""

    def __init__(self, read):
        super().__init__()
        self.hook_state, self.read = HookPoint(), read
        self.setup()

    def forward(self, x):
        return self.read(self.hook_state(x), x)


def patched(model, hook, shape=(1, 1)):
    base, source = torch.randn(2, N, D, generator=torch.Generator().manual_seed(0))
    result = interchange(
        model, base, source, hooks={"site": hook}, where=torch.ones(shape, dtype=torch.bool),
        metrics={"sum": lambda output, rows: output.float().flatten(1).sum(1)}, resamples=1,
    )  # fmt: skip
    return result["example_value"].sel(metric="sum", site="site").to_numpy(), base, source


WEIGHTS = "layer.attention.hook_out_1"
REFUSED = rf"must have values that are read downstream, got '{WEIGHTS}', which nothing reads"


def test_what_a_module_only_returns_cannot_be_exchanged_or_erased():
    model = hooked(Model())
    with pytest.raises(ValueError, match=REFUSED):
        patched(model, WEIGHTS)
    codes, label = torch.randn(N, D), torch.arange(N) % 2
    answers = {"answer": lambda output: output.argmax(-1), "outcomes": {"label": label}}
    with pytest.raises(ValueError, match=REFUSED):
        erase(model, codes, label, codes, hooks={"site": WEIGHTS}, **answers)
    pairs = Swaps(codes, codes, {"label": label}, own=label)
    with pytest.raises(ValueError, match=REFUSED):
        align(
            model, pairs, {"test": pairs}, sites={"site": Vector(WEIGHTS)}, ranks=[1],
            logits=lambda output: output,
        )  # fmt: skip


def test_the_output_of_the_same_module_can_be():
    found, _, source = patched(hooked(Model()), "layer.hook_out")
    torch.testing.assert_close(torch.from_numpy(found).float(), Model()(source).sum(1))


def with_branch(state, x):
    return x * 2 if state.sum() > 0 else x


def with_list(state, x):
    return x + torch.tensor(state.tolist())


def in_place(state, x):
    result = torch.zeros_like(x)
    rows = result.view(-1)
    result.copy_(state)
    return rows.reshape(x.shape)


@pytest.mark.parametrize(
    "read",
    [
        lambda state, x: x + 0 * state,
        lambda state, x: nn.functional.one_hot(state.argmax(-1), D) * x,
        lambda state, x: x.where(state > 1e9, -x),
        lambda state, x: x[:, :1].repeat(1, len(state.nonzero())),
        with_branch,
        with_list,
        in_place,
    ],
    ids=["weight 0", "argmax", "mask", "size", "branch", "list", "in place"],
)
def test_what_is_read_may_be_exchanged_whatever_it_changes(read):
    patched(Reading(read), "hook_state")


def test_a_site_may_have_hooks_that_are_not_read_beside_those_that_are():
    model = hooked(Model())
    found, _, source = patched(model, [WEIGHTS, At("layer.hook_out")])
    torch.testing.assert_close(torch.from_numpy(found).float(), Model()(source).sum(1))
