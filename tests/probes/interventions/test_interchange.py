import numpy as np
import pytest
import torch
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from probes import interchange

N, F = 200, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.hook_pattern = HookPoint()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()


class RuleModel(HookedRootModule):
    """Inputs (rule, a, b); answers a + b or a - b mod F, as the attention of layer 1 says.

    Each layer attends [example, head 1, query 2, key 2] by the rule; only query 1 of layer 1 is
    used: its weights choose between the two answers. Layer 0 says the rule too, but has the
    weight 0: readable, not used.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.setup()

    def forward(self, x):
        rule, a, b = x.unbind(1)
        chosen = nn.functional.one_hot(rule, 2).float()
        pattern = chosen[:, None, None].repeat(1, 1, 2, 1)
        unused = self.blocks[0].attn.hook_pattern(pattern)
        weights = self.blocks[1].attn.hook_pattern(pattern + 0 * unused)[:, 0, 1]
        answers = torch.stack([(a + b) % F, (a - b) % F], dim=1)
        return (weights[..., None] * nn.functional.one_hot(answers, F)).sum(dim=1)


def answer_of(rule, x):
    return torch.where(rule == 0, x[:, 1] + x[:, 2], x[:, 1] - x[:, 2]) % F


@pytest.fixture
def pairs():
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(F, (N, 3), generator=generator)
    source = torch.randint(F, (N, 3), generator=generator)
    # b not 0 or F/2: the two rules never agree
    base[:, 2] = torch.tensor([1, 2, 3, 5, 6, 7])[base[:, 2] % 6]
    base[:, 0] %= 2
    source[:, 0] = 1 - base[:, 0]
    return base, source


def run(base, source, *, where=None, batch_size=64, hooks=None, **more):
    if where is None:
        where = torch.zeros(1, 1, 2, 2, dtype=torch.bool)
        where[:, :, 1] = True
    arguments = {
        "hooks": hooks
        or {
            "0": "blocks.0.attn.hook_pattern",
            "1": "blocks.1.attn.hook_pattern",
            "all": "blocks.*.attn.hook_pattern",
        },
        "where": where,
        "answer": lambda logits: logits.argmax(-1),
        "outcomes": {
            "source's rule": answer_of(source[:, 0], base),
            "own rule": answer_of(base[:, 0], base),
        },
        "batch_size": batch_size,
    } | more
    return interchange(RuleModel(), base, source, **arguments)


def test_the_used_code_flips_every_answer_and_the_other_none(pairs):
    result = run(*pairs)
    assert result["site"].to_numpy().tolist() == ["none", "0", "1", "all"]
    flipped = result["rate"].sel(outcome="source's rule").to_numpy()
    own = result["rate"].sel(outcome="own rule").to_numpy()
    np.testing.assert_array_equal(flipped, [0, 0, 1, 1])
    np.testing.assert_array_equal(own, [1, 1, 0, 0])
    # The exact interval is one-sided at the ends and never empty.
    np.testing.assert_allclose(
        result["rate_low"].sel(site="1", outcome="source's rule"), 0.025 ** (1 / N), atol=1e-6
    )
    assert result["rate_high"].sel(site="1", outcome="source's rule") == 1
    assert result["hit"].dims == ("site", "outcome", "example")
    assert result["hit"].dtype == np.int8
    assert all(variable.attrs["long_name"] for variable in result.data_vars.values())


def test_a_source_with_the_same_rule_changes_nothing(pairs):
    base, source = pairs
    source[:, 0] = base[:, 0]
    result = run(base, source)
    assert (result["rate"].sel(outcome="own rule") == 1).all()


def test_only_the_named_entries_are_patched(pairs):
    base, source = pairs
    where = torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    where[:, :, 0] = True  # the query that nobody uses
    assert (run(base, source, where=where)["rate"].sel(outcome="own rule") == 1).all()
    # per example: the even ones alone
    where = torch.zeros(N, 1, 2, 1, dtype=torch.bool)
    where[::2] = True
    hit = run(base, source, where=where)["hit"].sel(site="1", outcome="source's rule")
    assert hit.to_numpy().tolist() == [1, 0] * (N // 2)


def test_several_scopes_are_patched_one_by_one(pairs):
    used, unused = (torch.zeros(1, 1, 2, 2, dtype=torch.bool) for _ in range(2))
    used[:, :, 1] = unused[:, :, 0] = True
    some = torch.zeros(N, 1, 2, 1, dtype=torch.bool)
    some[::2] = True
    scopes = {"used": used, "unused": unused, "some": some}
    result = run(*pairs, where=scopes)
    assert result["rate"].dims == ("scope", "site", "outcome")
    for scope, where in scopes.items():
        alone = run(*pairs, where=where)
        assert "scope" not in alone.coords
        assert result.sel(scope=scope, drop=True).identical(alone)


def test_batches_do_not_matter(pairs):
    assert run(*pairs, batch_size=7).identical(run(*pairs, batch_size=N))


def test_answers_of_several_parts_hit_together(pairs):
    base, source = pairs
    own, other = answer_of(base[:, 0], base), answer_of(source[:, 0], base)
    result = run(
        base,
        source,
        hooks={"1": "blocks.1.attn.hook_pattern"},
        answer=lambda logits: torch.stack([logits.argmax(-1), logits.argmax(-1)], dim=1),
        outcomes={
            "both": torch.stack([other, other], dim=1),
            "one": torch.stack([other, own], dim=1),
        },
    )
    assert result["rate"].sel(site="1").to_numpy().tolist() == [1, 0]


def test_minus_one_is_met_by_any_answer(pairs):
    base, source = pairs
    target = answer_of(source[:, 0], base)
    result = interchange(
        RuleModel(),
        base,
        source,
        hooks={"used": "blocks.1.attn.hook_pattern"},
        where=torch.ones(1, 1, 1, 1, dtype=torch.bool),
        answer=lambda logits: torch.stack([logits.argmax(-1), torch.arange(len(logits))], dim=1),
        outcomes={
            "open": torch.stack([target, torch.full_like(target, -1)], dim=1),
            "wrong": torch.stack([(target + 1) % F, torch.full_like(target, -1)], dim=1),
        },
    )
    assert result["rate"].sel(site="used").to_numpy().tolist() == [1.0, 0.0]


def test_works_on_a_bridge(bridge):
    tokens = torch.randint(11, (2, 6, 8), generator=torch.Generator().manual_seed(0))
    base, source = tokens
    everything = torch.ones(1, 1, 1, dtype=torch.bool)
    bridge.eval()
    result = interchange(
        bridge,
        base,
        source,
        hooks={"last": "blocks.1.hook_resid_post"},
        where=everything,
        answer=lambda logits: logits[:, -1].argmax(-1),
        outcomes={
            "base": bridge(base)[:, -1].argmax(-1),
            "source": bridge(source)[:, -1].argmax(-1),
        },
    )
    # The whole last residual stream decides the answer.
    assert result["rate"].sel(site="last", outcome="source") == 1
    assert result["rate"].sel(site="none", outcome="base") == 1
    assert not bridge.list_hooks()


def test_invalid_input_is_refused(pairs):
    base, source = pairs
    with pytest.raises(ValueError, match="together, or metrics, got only outcomes"):
        run(base, source, answer=None)
    with pytest.raises(ValueError, match="together, or metrics, got only answer"):
        run(base, source, outcomes=None)
    with pytest.raises(ValueError, match="together, or metrics, got neither"):
        run(base, source, outcomes=None, answer=None)
    with pytest.raises(
        ValueError, match="source_inputs must have the 200 examples of base_inputs, got 199"
    ):
        interchange(
            RuleModel(),
            base,
            source[:-1],
            hooks={"1": "blocks.1.attn.hook_pattern"},
            where=torch.ones(1, 1, 1, 1, dtype=torch.bool),
            answer=lambda logits: logits.argmax(-1),
            outcomes={"x": base[:, 0]},
        )
    with pytest.raises(TypeError, match="where must be a bool"):
        run(base, source, where=torch.ones(1, 1, 2, 2))
    with pytest.raises(ValueError, match="where must broadcast"):
        run(base, source, where=torch.ones(1, 1, 3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="where must broadcast"):
        run(base, source, where=torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="must have 200 examples or 1"):
        run(base, source, where=torch.ones(2, 1, 2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="at least one scope"):
        run(base, source, where={})
    with pytest.raises(TypeError, match=r"where\['row'\] must be a bool"):
        run(base, source, where={"row": torch.ones(1, 1, 2, 2)})
    with pytest.raises(ValueError, match="at least one outcome"):
        run(base, source, outcomes={})
    with pytest.raises(ValueError, match="shape of the answers"):
        run(base, source, outcomes={"x": base})
    with pytest.raises(TypeError, match="integers"):
        run(base, source, answer=lambda logits: logits.amax(-1))
    with pytest.raises(TypeError, match=r"outcomes\['o'\] must hold integers, got torch.float32"):
        run(base, source, outcomes={"o": torch.full((N,), torch.nan)})
    with pytest.raises(ValueError, match="answer must return a tensor"):
        run(base, source, answer=lambda logits: logits.argmax())
    with pytest.raises(KeyError, match=r"blocks\.1\.attn\.hook_pattern"):
        run(base, source, hooks={"x": "blocks.2.attn.hook_pattern"})
    with pytest.raises(ValueError, match="at least one site"):
        run(base, source, hooks={"none": "blocks.1.attn.hook_pattern"})


def test_hooks_are_gone_after_an_error(pairs):
    base, source = pairs
    model = RuleModel().train()

    def fail(logits):
        raise ArithmeticError("in the answer")

    with pytest.raises(ArithmeticError):
        interchange(
            model,
            base,
            source,
            hooks={"1": "blocks.1.attn.hook_pattern"},
            where=torch.ones(1, 1, 1, 1, dtype=torch.bool),
            answer=fail,
            outcomes={"x": base[:, 0]},
        )
    assert not model.list_hooks()
    assert model.training
