"""Small hand-made models that the probes are tested on."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint


@dataclass(frozen=True)
class SimpleBatch:
    inputs: Tensor
    latents: dict[str, Tensor]


class ToyAttention(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.hook_pattern = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        batch, pos, d_model = x.shape
        split = self.qkv(x).view(batch, pos, 3, self.n_heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        pattern = self.hook_pattern(scores.softmax(dim=-1))
        return (pattern @ v).transpose(1, 2).reshape(batch, pos, d_model)


class ToyBlock(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.attn = ToyAttention(d_model, n_heads)
        self.dropout = nn.Dropout(0.5)
        self.hook_resid_post = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        return self.hook_resid_post(x + self.dropout(self.attn(x)))


class ToyModel(HookedRootModule):
    """A transformer of attention alone on vectors [batch, pos, d_model]."""

    def __init__(self, n_layers: int = 2, d_model: int = 8, n_heads: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ToyBlock(d_model, n_heads) for _ in range(n_layers))
        self.hook_unused = HookPoint()
        self.setup()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def toy_model():
    def build(n_layers: int = 2) -> ToyModel:
        torch.manual_seed(0)
        return ToyModel(n_layers)

    return build


@pytest.fixture
def make_batches():
    def build(count: int, size: int = 5, pos: int = 4, d_model: int = 8) -> list[SimpleBatch]:
        generator = torch.Generator().manual_seed(1)
        return [
            SimpleBatch(
                torch.randn(size, pos, d_model, generator=generator),
                {
                    "index": torch.arange(i * size, (i + 1) * size),
                    "rule": torch.randint(8, (size, 3), generator=generator),
                },
            )
            for i in range(count)
        ]

    return build


@pytest.fixture
def bridge():
    from transformer_lens.model_bridge import TransformerBridge

    config = {
        "n_layers": 2,
        "d_model": 16,
        "n_heads": 4,
        "d_head": 4,
        "d_mlp": 32,
        "n_ctx": 8,
        "d_vocab": 11,
        "act_fn": "gelu",
        "seed": 0,
        "device": "cpu",
    }
    return TransformerBridge.boot_native(config)
