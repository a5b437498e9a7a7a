"""The loss of a language model by the number of context tokens."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from probes.capturing.hooking import evaluating
from probes.capturing.inputs import Inputs, call
from probes.checking import checked
from probes.progress import progress
from probes.statistics.intervals import bootstrap_ratio, interval_variables


@runtime_checkable
class Windows(Protocol):
    """An object with windows of a text, such as a task's batch."""

    @property
    def inputs(self) -> Inputs:
        """Inputs of the model."""
        ...

    @property
    def targets(self) -> Int[Tensor, "window pos"]:
        """Next token at each position."""
        ...

    @property
    def mask(self) -> Bool[Tensor, "window pos"]:
        """True where the target counts."""
        ...


@checked
def measure_loss_by_context(
    model: nn.Module, batches: Iterable[Windows], *, resamples: int = 1000, seed: int = 0
) -> xr.Dataset:
    """Measure the loss of a causal model by context length: 1, 2, 3 to 4, 5 to 8, ... tokens.

    Runs the model in evaluation mode and passes the cross-entropy of its logits [window, pos,
    token], in nats, to `loss_by_context`.

    Args:
        model: a module that returns logits; it needs no hooks.
        batches: windows of the same length, with `.inputs`, `.targets` and `.mask`.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.

    Returns:
        The results of `loss_by_context`, with the windows in the order of the batches.

    Raises:
        ValueError: there is no batch, logits and targets do not match in shape, or a loss that
            counts is not finite.

    Example:
        >>> found = measure_loss_by_context(model, batches)
        >>> found["seen"].values, found["tokens"].values  # of 20 windows of 8 tokens
        (array([1, 2, 4, 8]), array([20., 20., 40., 80.]))
    """
    losses, masks = [], []
    with evaluating(model):
        for batch in progress(batches, "loss by context"):
            logits = call(model, batch.inputs)
            if logits.ndim != 3 or logits.shape[:2] != batch.targets.shape:
                raise ValueError(
                    "logits must have the shape (window, pos, token), the first two of targets, "
                    f"{tuple(batch.targets.shape)}, got {tuple(logits.shape)}"
                )
            loss = cross_entropy(logits.float().mT, batch.targets, reduction="none")
            losses.append(loss.double().cpu())
            masks.append(batch.mask.cpu())
    if not losses:
        raise ValueError("batches must hold at least one batch, got none")
    loss, mask = (
        xr.DataArray(torch.cat(tensors).numpy(), dims=("window", "pos"))
        for tensors in (losses, masks)
    )
    return loss_by_context(loss, mask, resamples=resamples, seed=seed)


@checked
def loss_by_context(
    loss: xr.DataArray, mask: xr.DataArray, *, resamples: int = 1000, seed: int = 0
) -> xr.Dataset:
    """Compute the loss by context length: 1, 2, 3 to 4, 5 to 8, ... tokens.

    At position n a causal model sees n + 1 tokens. Where the loss stops falling, the model makes
    no use of tokens further back (Khandelwal et al. 2018, "Sharp Nearby, Fuzzy Far Away").

    Args:
        loss: loss of each predicted token [window, pos] (dims in any order), in nats.
        mask: [window, pos] bool, True for tokens that count; other losses are ignored.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.

    Returns:
        By `seen`, the largest context length of a group, and by `window`, numbered from 0:

        - `loss, loss_low, loss_high` [seen]: mean per token, in nats, NaN without tokens; 95%
          interval by percentile bootstrap over windows.
        - `tokens` [seen]: number of tokens that count.
        - `window_loss`, `window_tokens` [window]: sum of losses and number of tokens, for paired
          comparisons of models on the same windows.

    Raises:
        TypeError: `mask` is not bool.
        ValueError: dims or sizes do not match, an array is empty, or a loss that counts is not
            finite.

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
        raise TypeError(f"mask must hold bool, got {mask.dtype}")
    counts = mask.transpose("window", "pos").to_numpy().astype(float)
    losses = loss.transpose("window", "pos").to_numpy().astype(float)
    losses = np.where(counts > 0, losses, 0)
    if not np.isfinite(losses).all():
        raise ValueError(
            f"loss must be finite where mask is True, got {losses[~np.isfinite(losses)][0]}"
        )
    length = losses.shape[1]
    # First position of each group; groups end at powers of two.
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
