"""What does a model of a text gain from the tokens it has seen? Its loss by their number."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from probes.capturing.hooking import HookedModel, evaluating
from probes.capturing.inputs import Inputs, call
from probes.statistics.intervals import bootstrap_ratio, interval_variables


class Windows(Protocol):
    """Any object with windows of a text, such as a task's batch."""

    @property
    def inputs(self) -> Inputs:
        """What the model is called with."""
        ...

    @property
    def targets(self) -> Int[Tensor, "window pos"]:
        """The token that comes next, at each position."""
        ...

    @property
    def mask(self) -> Bool[Tensor, "window pos"]:
        """Where the target counts."""
        ...


def measure_loss_by_context(
    model: HookedModel, batches: Iterable[Windows], *, resamples: int = 1000, seed: int = 0
) -> xr.Dataset:
    """Measure the loss of a causal model where 1, 2, 3 to 4, 5 to 8, ... tokens are seen.

    Runs the model, in evaluation mode, over the batches, and passes the cross-entropy of its
    logits [window, pos, token], in nats, on to `loss_by_context`.

    Args:
        model: any module that answers logits; hooks are not needed.
        batches: windows of one length, with `.inputs`, `.targets` and `.mask`.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        What `loss_by_context` returns, with the windows in the batches' order.

    Raises:
        ValueError: there is no batch, or logits have another shape than targets.

    Example:
        `measure_loss_by_context(model, [task.batch("test", 0, 100)])`
    """
    losses, masks = [], []
    with evaluating(model):
        for batch in batches:
            logits = call(model, batch.inputs)
            if logits.ndim != 3 or logits.shape[:2] != batch.targets.shape:
                raise ValueError(
                    "logits must have the shape (window, pos, token), the first two as targets, "
                    f"{tuple(batch.targets.shape)}, got {tuple(logits.shape)}"
                )
            loss = cross_entropy(logits.float().mT, batch.targets, reduction="none")
            losses.append(loss.double().cpu())
            masks.append(batch.mask.cpu())
    if not losses:
        raise ValueError("batches must hold at least one, got none")
    loss, mask = (
        xr.DataArray(torch.cat(some).numpy(), dims=("window", "pos")) for some in (losses, masks)
    )
    return loss_by_context(loss, mask, resamples=resamples, seed=seed)


def loss_by_context(
    loss: xr.DataArray, mask: xr.DataArray, *, resamples: int = 1000, seed: int = 0
) -> xr.Dataset:
    """Compute the loss where 1, 2, 3 to 4, 5 to 8, ... tokens of a window are seen.

    At position n a causal model has seen n + 1 tokens. Where the loss no longer falls, tokens
    further back are of no use to it (Khandelwal et al. 2018, "Sharp Nearby, Fuzzy Far Away").

    Args:
        loss: [window, pos], in any order: of each token that is predicted, in nats.
        mask: [window, pos] bool: which tokens count; what the others' losses are does not matter.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        By `seen`, the most tokens that are seen, and by `window`, numbered from 0:

        - `loss`, with `_low` and `_high` [seen]: mean of a token, in nats; NaN where none counts.
          Interval: 95%, percentile bootstrap over windows.
        - `tokens` [seen]: how many count.
        - `window_loss`, `window_tokens` [window]: the sum over a window, and how many count: with
          these, models that saw the same windows are compared in pairs.

    Raises:
        TypeError: `mask` that is not bool.
        ValueError: dims or sizes that do not fit, or nothing at all.

    Example:
        >>> ones = xarray.DataArray(numpy.ones((10, 6)), dims=("window", "pos"))
        >>> loss_by_context(ones, ones > 0)["seen"].values.tolist()
        [1, 2, 4, 6]
    """
    for name, array in (("loss", loss), ("mask", mask)):
        if set(array.dims) != {"window", "pos"} or 0 in array.shape:
            raise ValueError(
                f"{name} must have the dims 'window' and 'pos', none of them empty, "
                f"got {dict(array.sizes)}"
            )
    if dict(loss.sizes) != dict(mask.sizes):
        raise ValueError(f"mask must have the sizes of loss, {dict(loss.sizes)}, got {mask.sizes}")
    if mask.dtype != bool:
        raise TypeError(f"mask must hold booleans, got {mask.dtype}")
    counts = mask.transpose("window", "pos").to_numpy().astype(float)
    losses = loss.transpose("window", "pos").to_numpy().astype(float)
    losses = np.where(counts > 0, losses, 0)
    length = losses.shape[1]
    # Of each group of positions the first; a group ends with a power of two.
    starts = [0, *(2**power for power in range(length.bit_length()) if 2**power < length)]
    sums, tokens = (np.add.reduceat(values, starts, axis=1) for values in (losses, counts))
    means = bootstrap_ratio(sums, tokens, resamples=resamples, seed=seed)
    return xr.Dataset(
        interval_variables("loss", means, ("seen",), long_name="loss", units="nats")
        | {
            "tokens": ("seen", tokens.sum(0), {"long_name": "tokens that were predicted so"}),
            "window_loss": (
                "window",
                losses.sum(1),
                {"long_name": "summed loss", "units": "nats"},
            ),
            "window_tokens": ("window", counts.sum(1), {"long_name": "tokens"}),
        },
        coords={
            "seen": ("seen", [*starts[1:], length], {"long_name": "tokens that are seen, at most"}),
            "window": np.arange(len(losses)),
        },
    )
