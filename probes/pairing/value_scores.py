"""Which retrievals do searches choose? Value scores by group, whatever the true pairing is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from probes.capturing.capture import Batch, Quantity, capture
from probes.capturing.hooking import HookedModel

_TOLERANCE = 1e-2  # rows of bfloat16 probabilities sum to 1 within 0.004


def measure_value_scores(
    model: HookedModel,
    batches: Sequence[Batch],
    groups: Callable[[Any], Mapping[str, Bool[Tensor, " example"]]],
    *,
    attention: str = "blocks.*.attn",
) -> xr.Dataset:
    """Measure which retrievals the searches of a model choose in groups of examples.

    Runs the model over the batches and passes what it captures on to `summarise_value_scores`.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        batches: objects with `.inputs` and `.latents`.
        groups: from a batch to which of its examples are in which group, the same names for all.
        attention: the layers, as a glob, which have the hook `hook_value_scores` [example, pos,
            search, retrieval].

    Returns:
        What `summarise_value_scores` returns, also by `layer` and `token`: `all`, the mean over
        positions, and `last`, the last position, where some models answer.

    Raises:
        KeyError: a hook that there is none of.
        TypeError, ValueError: see `capture` and `summarise_value_scores`; no batches.

    Example:
        `measure_value_scores(model, batches, lambda batch: {"even": batch.latents["n"] % 2 == 0})`

    Source:
        Mittal et al. 2021, "Compositional Attention", figures 14 and 15.
    """
    if not batches:
        raise ValueError("batches must hold at least one, got none")
    quantity = Quantity(
        f"{attention}.hook_value_scores",
        dims=("example", "token", "search", "retrieval"),
        reduce=lambda scores: torch.stack([scores.mean(1), scores[:, -1]], 1),
        long_name="value scores",
    )
    scores = capture(model, batches, {"scores": quantity})["scores"]
    members = [groups(batch) for batch in batches]
    names = list(members[0])
    member = torch.cat([torch.stack([one[name] for name in names]) for one in members], 1)
    of_group = xr.DataArray(
        member.cpu().numpy(), dims=("group", "example"), coords={"group": names}
    )
    return summarise_value_scores(scores.assign_coords(token=["all", "last"]), of_group)


def summarise_value_scores(value_scores: xr.DataArray, groups: xr.DataArray) -> xr.Dataset:
    """Compute mean value scores of groups of examples, how tight they are, and how far apart.

    Mittal et al. 2021, "Compositional Attention", Figures 14 and 15: where nobody knows the true
    pairing (with one, see `score_pairing`), it is asked whether each search keeps to a retrieval
    of its own, and whether different questions use different ones. The untrained model is the
    control: its value scores are neither even nor equal in all groups either.

    Args:
        value_scores: [example, search, retrieval] and any further dims (`layer`, `token`), in any
            order: probabilities over `retrieval`.
        groups: [group, example] bool, with the groups' names as labels: which examples are in
            each; an example can be in several. A group without examples has NaN everywhere.

    Returns:
        The further dims stand for ...

        - `value_scores` [group, ..., search, retrieval]: means over the examples of a group, in
          0..1.
        - `tightness` [group, ...]: the greatest of these means of a search, in the mean over
          searches: 1 where each search has one retrieval in all examples, 1/R where they are even.
        - `distance` [group, other_group, ...]: the total variation distance between the means of
          two groups, in the mean over searches: 0 where they are the same, 1 where no search
          shares a retrieval between them.

    Raises:
        TypeError: `groups` that are not bool.
        ValueError: dims or sizes that do not fit, value scores that are no probabilities.

    Example:
        >>> scores = xarray.DataArray([[[1.0, 0.0]], [[0.0, 1.0]]], dims=("example", "search",
        ...     "retrieval"))
        >>> of = xarray.DataArray([[True, False], [False, True]], dims=("group", "example"),
        ...     coords={"group": ["unary", "binary"]})
        >>> float(summarise_value_scores(scores, of)["distance"].sel(group="unary",
        ...     other_group="binary"))
        1.0
    """
    _check(value_scores, groups)
    member = groups.astype(float)
    with np.errstate(invalid="ignore"):
        means = xr.dot(member, value_scores, dim="example") / member.sum("example")
    numbers = {dim: np.arange(means.sizes[dim]) for dim in ("search", "retrieval")}
    means = means.assign_coords(numbers).transpose("group", ..., "search", "retrieval")
    apart = abs(means - means.rename(group="other_group")).sum("retrieval", skipna=False) / 2
    return xr.Dataset(
        {
            "value_scores": means.assign_attrs(long_name="mean value score"),
            "tightness": means.max("retrieval")
            .mean("search")
            .assign_attrs(long_name="mean greatest share of a search"),
            "distance": apart.mean("search")
            .transpose("group", "other_group", ...)
            .assign_attrs(long_name="total variation distance between groups"),
        }
    )


def _check(value_scores: xr.DataArray, groups: xr.DataArray) -> None:
    needed = ("example", "search", "retrieval")
    if not set(needed) <= set(value_scores.dims) or 0 in value_scores.shape:
        raise ValueError(
            f"value_scores must have the dims {needed}, none of them empty, "
            f"got {dict(value_scores.sizes)}"
        )
    sums = value_scores.sum("retrieval")
    if not (value_scores >= 0).all() or not (abs(sums - 1) <= _TOLERANCE).all():
        raise ValueError(
            "value_scores must hold probabilities over 'retrieval', at least 0, that sum to 1, "
            f"got values in {float(value_scores.min()):g}..{float(value_scores.max()):g} and sums "
            f"in {float(sums.min()):g}..{float(sums.max()):g}"
        )
    examples = value_scores.sizes["example"]
    if set(groups.dims) != {"group", "example"} or groups.sizes["example"] != examples:
        raise ValueError(
            f"groups must have the dims 'group' and 'example', of size {examples}, "
            f"got {dict(groups.sizes)}"
        )
    if "group" not in groups.coords:
        raise ValueError("groups must have their names as labels of 'group', got none")
    if groups.dtype != bool:
        raise TypeError(f"groups must hold booleans, got {groups.dtype}")
