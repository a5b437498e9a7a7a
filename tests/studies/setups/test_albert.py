"""ALBERT with hooks, beside ALBERT as transformers runs it."""

import pytest
import torch
from transformers import AlbertConfig, AlbertModel

import mechanisms
from studies.setups.albert import MOST_COLUMNS, Albert

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 0, -1, -1], [6, -1, -1, -1]])
SIZES = {"embedding_size": 12, "hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 3}


def albert(n_steps=3, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    options = {"readout": "last"} | SIZES | options
    return Albert(7, 5, n_steps=n_steps, generator=generator, **options).eval()


@pytest.mark.parametrize("n_steps", [1, 3, 5])
@pytest.mark.parametrize("readout", ["first", "last"])
def test_it_is_that_of_transformers(readout, n_steps):
    ours = albert(readout=readout)
    config = AlbertConfig(
        vocab_size=9, max_position_embeddings=MOST_COLUMNS, num_hidden_layers=n_steps, **SIZES
    )
    theirs = AlbertModel(config, add_pooling_layer=False).eval()
    theirs.load_state_dict(ours.albert.state_dict())
    ids, mask, end = mechanisms.enclose(TOKENS, 7)
    states = theirs(ids, attention_mask=mask.long()).last_hidden_state
    column = states[:, 0] if readout == "first" else states[range(3), end]
    logits = ours(TOKENS, n_steps=n_steps)
    assert logits.shape == (3, 1, 5)
    assert torch.allclose(logits[:, 0], ours.unembed(column), atol=1e-6)


def test_each_step_has_hooks_that_can_be_edited():
    model = albert()
    model.set_steps(4)
    logits, cache = model.run_with_cache(TOKENS, n_steps=4)
    patterns = [cache[f"blocks.{step}.attn.hook_pattern"] for step in range(4)]
    for pattern in patterns:
        assert pattern.shape == (3, 3, 6, 6)
        assert torch.allclose(pattern.sum(-1), torch.ones(()))
        assert not pattern[2, :, :, 3:].any()
    for step in range(3):
        after = cache[f"blocks.{step}.hook_resid_post"]
        assert torch.equal(after, cache[f"blocks.{step + 1}.hook_resid_pre"])
    cut = [("blocks.2.attn.hook_pattern", lambda pattern, hook: pattern * 0)]
    assert not torch.allclose(model.run_with_hooks(TOKENS, n_steps=4, fwd_hooks=cut), logits)


def test_weights_are_drawn_from_the_generator_alone():
    state = torch.random.get_rng_state()
    first, again, other = albert(), albert(), albert(seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first(TOKENS), again(TOKENS))
    assert not torch.equal(first(TOKENS), other(TOKENS))


def test_sequences_without_positions_are_refused():
    with pytest.raises(ValueError, match="at most 62 pos, got 63"):
        albert()(torch.zeros(1, 63, dtype=torch.long))
