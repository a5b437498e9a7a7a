"""Random expression trees as programs of gates and attention, and a model that runs them."""

from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

STEPS, WIDTH, HEADS = 6, 24, 2


@dataclass(frozen=True)
class Programs:
    """Trees written on columns in random order, with a second tree that nobody reads.

    A node's value is 1 + the sum of its arguments' values; a literal's is in 1..5. Column 0 is a
    BOS that does nothing, the last valid column an EOS that reads the root, one step after it.

    Attributes:
        args: the target column reads the source column, also EOS the root [example, pos, pos].
        when: the step at which a column computes, -1 for never [example, pos].
        leaf: values of literals, else 0 [example, pos].
        answer: the root's value, by recursion [example].
        truth: as `score_control_flow` takes it.
        valid: [example, pos].
    """

    args: np.ndarray
    when: np.ndarray
    leaf: np.ndarray
    answer: np.ndarray
    truth: xr.Dataset
    valid: xr.DataArray

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        rows = torch.from_numpy(self.truth["readout"].to_numpy())
        return (
            torch.from_numpy(self.args).float(),
            torch.from_numpy(self.when),
            torch.from_numpy(self.leaf).float(),
            rows,
        )

    def gates(self, rng: np.random.Generator) -> xr.DataArray:
        """Above 0.9 where a column computes, below 0.1 elsewhere."""
        on = self.when[:, None] == np.arange(STEPS)[:, None]
        noise = rng.random(on.shape) / 10
        return xr.DataArray(np.where(on, 1 - noise, noise), dims=("example", "step", "pos"))

    def attention(self, rng: np.random.Generator) -> xr.DataArray:
        """Above 0.9 in one head where a column reads, below 0.1 elsewhere."""
        head = np.arange(HEADS)[:, None, None] == np.arange(WIDTH) % HEADS
        on = np.broadcast_to(
            (self.args[:, None] & head)[:, None], (len(self.args), STEPS, HEADS, WIDTH, WIDTH)
        )
        noise = rng.random(on.shape) / 10
        dims = ("example", "step", "head", "query_pos", "key_pos")
        return xr.DataArray(np.where(on, 1 - noise, noise), dims=dims)


def make_programs(examples: int, seed: int = 0, *, second_tree: bool = True) -> Programs:
    rng = np.random.default_rng(seed)
    args = np.zeros((examples, WIDTH, WIDTH), dtype=bool)
    when = np.full((examples, WIDTH), -1)
    level = np.full((examples, WIDTH), -1)
    leaf = np.zeros((examples, WIDTH), dtype=np.int64)
    valid = np.zeros((examples, WIDTH), dtype=bool)
    edges = np.full((examples, WIDTH, 2), -1)
    answer, root, readout, depth = (np.zeros(examples, dtype=np.int64) for _ in range(4))
    for example in range(examples):
        # (arguments, literal) by number; children come before their parent.
        nodes: list[tuple[list[int], int]] = []

        def grow(nodes: list[tuple[list[int], int]], below: int, room: int) -> int:
            children: list[int] = []
            if below:
                start = len(nodes)
                for child in range(int(rng.integers(1, 4))):
                    left = room - (len(nodes) - start) - 2
                    if left > 1 or child == 0:
                        deep = below - 1 if child == 0 else int(rng.integers(0, below))
                        children.append(grow(nodes, deep if left > 3 else 0, left))
            nodes.append((children, int(rng.integers(1, 6))))
            return len(nodes) - 1

        tops = [grow(nodes, int(rng.integers(1, 5)), 11)]
        if second_tree:
            tops.append(grow(nodes, 2, 6))
        size = len(nodes) + 2
        assert size <= WIDTH
        column = 1 + rng.permutation(len(nodes))
        values: list[int] = []
        pairs = []
        for number, (children, literal) in enumerate(nodes):
            here = column[number]
            values.append(1 + sum(values[c] for c in children) if children else literal)
            level[example, here] = 1 + max(
                (level[example, column[c]] for c in children), default=-1
            )
            when[example, here] = level[example, here] - 1
            leaf[example, here] = 0 if children else literal
            pairs += [(column[c], here) for c in children]
        edges[example, : len(pairs)] = pairs
        eos = size - 1
        valid[example, :size] = True
        root[example], readout[example] = column[tops[0]], eos
        answer[example] = values[tops[0]]
        depth[example] = level[example, root[example]]
        args[example, [t for _, t in pairs], [s for s, _ in pairs]] = True
        args[example, eos, root[example]] = True
        when[example, eos] = depth[example]
    truth = xr.Dataset(
        {
            "edges": (("example", "edge", "end"), edges),
            "level": (("example", "pos"), level),
            "readout": ("example", readout),
            "root": ("example", root),
            "depth": ("example", depth),
        }
    )
    return Programs(args, when, leaf, answer, truth, xr.DataArray(valid, dims=("example", "pos")))


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.hook_pattern = HookPoint()


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = _Attention()
        self.hook_gate = HookPoint()


class ProgramModel(HookedRootModule):
    """Runs a program by its gates and attention; returns the state of the read-out column."""

    def __init__(self, steps: int = STEPS):
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(steps))
        self.setup()

    def forward(self, args, when, leaf, readout):
        state = leaf[..., None]
        head = torch.arange(HEADS)[:, None, None] == torch.arange(args.shape[-1]) % HEADS
        for step, block in enumerate(self.blocks):
            pattern = block.attn.hook_pattern(args[:, None] * head)
            gate = block.hook_gate((when == step).float()[..., None])
            own = (torch.arange(when.shape[1]) != readout[:, None]).float()
            update = own[..., None] + (pattern @ state[:, None]).sum(dim=1)
            state = gate * update + (1 - gate) * state
        return state[torch.arange(len(state)), readout, 0]


def answer_of(output: torch.Tensor) -> torch.Tensor:
    return output.round().long()
