"""Axes of a figure, readers of what is drawn on them, and a model that is not ours."""

from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from probes import Quantity, capture, hooked


@pytest.fixture
def ax():
    return Figure(layout="constrained").subplots()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.change = nn.Linear(6, 6)

    def forward(self, x):
        return x + 0.3 * torch.tanh(self.change(x))


def residual():
    """A plain torch model, without hooks: three blocks and a read-out of four classes."""
    names = {"blocks": nn.Sequential(Block(), Block(), Block()), "out": nn.Linear(6, 4)}
    return nn.Sequential(OrderedDict(names))


@pytest.fixture(scope="session")
def own_model():
    torch.manual_seed(0)
    return hooked(residual())


def batch(n, seed):
    """Points around the corners of a square, whose number is the label."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(4, (n,), generator=generator)
    x = torch.randn(n, 6, generator=generator)
    x[:, 0] += 2.0 * (label % 2)
    x[:, 1] += 2.0 * (label // 2)
    return SimpleNamespace(inputs=x, latents={"rule": label}, targets=label)


@pytest.fixture(scope="session")
def codes(own_model):
    """The codes of all blocks, to fit and to test, with names as labels."""
    quantity = Quantity("blocks.*.hook_out", ("example", "feature"))
    names = np.array(["constant", "sum", "difference", "other"])
    data = [capture(own_model, [batch(n, n)], {"code": quantity}) for n in (120, 80)]
    return [one.assign(rule=("example", names[one["rule"]])) for one in data]


def lines_of(ax):
    """The lines with error bars by label: the line, and the ends of its bars by position."""
    found = {}
    for container in ax.containers:
        line, _, bars = container.lines
        ends = {}
        for bar in bars:
            for (x, low), (_, high) in bar.get_segments():
                ends[round(float(x), 6)] = (low, high)
        found[container.get_label()] = (line, ends)
    return found


def names(ax, side):
    return [text.get_text() for text in getattr(ax, f"get_{side}ticklabels")()]


def legend(ax):
    return ax.get_legend_handles_labels()[1]
