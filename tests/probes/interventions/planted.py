"""Small GPT-2 bridges: one with random weights, and one in which a single head moves a token."""

import torch
import transformers
from transformer_lens.model_bridge.sources import build_bridge_from_module

VOCABULARY, N_POS, READ, LAST = 6, 4, 1, 3
"""The head 0.1 of the planted model reads the token at `READ` and writes it at `LAST`."""


def bridge(seed=0, **changes):
    """A GPT-2 of 2 layers and 2 heads with large random weights."""
    torch.manual_seed(seed)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 8}
    settings = {"initializer_range": 0.4, "tie_word_embeddings": False}
    config = transformers.GPT2Config(**sizes | settings | changes)
    model = transformers.GPT2LMHeadModel(config).eval()
    return build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=config)


def planted_bridge():
    """A GPT-2 whose last logits are those of the token at `READ`, through head 0.1 alone.

    Dims of the residual stream: 0..5 the token, 6..11 what the head writes, 12..15 the position.
    """
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=N_POS,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "ln_" not in name:
                weight.zero_()
        one_hot = torch.eye(VOCABULARY)
        model.transformer.wte.weight[:, :6] = one_hot
        model.transformer.wpe.weight[:, 12:] = torch.eye(N_POS)
        attention = model.transformer.h[0].attn
        head = 8  # the dims of head 1 within queries, keys and values
        attention.c_attn.weight[12 + LAST, head] = 10  # query
        attention.c_attn.weight[12 + READ, 16 + head] = 10  # key
        attention.c_attn.weight[:6, 32 + head : 32 + head + 6] = one_hot  # value
        attention.c_proj.weight[head : head + 6, 6:12] = one_hot
        model.lm_head.weight[:, 6:12] = one_hot
    return build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=config)


def pairs(n, differ_at, seed=0, n_pos=N_POS):
    """Tokens [n, pos] and the same with another token at one position."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(VOCABULARY, (n, n_pos), generator=generator)
    corrupted = clean.clone()
    shift = torch.randint(1, VOCABULARY, (n,), generator=generator)
    corrupted[:, differ_at] = (clean[:, differ_at] + shift) % VOCABULARY
    return clean, corrupted


def difference(clean, corrupted, at=READ):
    """The metric: the last logit of the clean token minus that of the corrupted one."""

    def metric(logits, rows):
        right, wrong = (
            logits[:, -1].gather(1, tokens[rows, at, None])[:, 0] for tokens in (clean, corrupted)
        )
        return right - wrong

    return metric
