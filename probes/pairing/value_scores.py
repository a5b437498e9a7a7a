"""Value scores by group of examples, without reference to a true pairing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from probes.capturing.capture import capture
from probes.capturing.hooking import HookedModel
from probes.capturing.passes import Batch
from probes.capturing.quantity import Quantity
from probes.checking import checked

_TOLERANCE = 1e-2  # rows of bfloat16 probabilities sum to 1 within 0.004


@checked
def measure_value_scores(
    model: HookedModel,
    batches: Sequence[Batch],
    groups: Callable[[Any], Mapping[str, Bool[Tensor, " example"]]],
    *,
    attention: str = "blocks.*.attn",
) -> xr.Dataset:
    """Measure which retrievals the searches of a model choose, by group of examples.

    Runs the model over the batches and passes the value scores to `summarise_value_scores`.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        batches: objects with `.inputs` and `.latents`.
        groups: maps a batch to masks of its examples by group, with the same names for all batches.
        attention: glob of the attention modules, which have the hook `hook_value_scores` [example,
            pos, search, retrieval].

    Returns:
        The results of `summarise_value_scores`, also by `layer` and `token`: `all`, the mean over
        positions, and `last`, the last position, where some models answer.

    Raises:
        KeyError: an unknown hook.
        TypeError, ValueError: as in `capture` and `summarise_value_scores`; or there are no
            batches, or batches have other groups than the first.

    Example:
        >>> def groups(batch): return {"first": batch.targets[:, 0] == 0}
        >>> measure_value_scores(model, batches, groups)

    Source:
        Mittal et al. 2021, "Compositional Attention", figures 14 and 15.
    """
    if not batches:
        raise ValueError("batches must hold at least one batch, got none")
    quantity = Quantity(
        f"{attention}.hook_value_scores",
        dims=("example", "token", "search", "retrieval"),
        reduce=lambda scores: torch.stack([scores.mean(1), scores[:, -1]], 1),
        long_name="value scores",
    )
    scores = capture(model, batches, {"scores": quantity})["scores"]
    members = [groups(batch) for batch in batches]
    names = list(members[0])
    for batch_members in members:
        if {*batch_members} != {*names}:
            raise ValueError(
                f"groups must have the same names for all batches, got {names} and "
                f"{list(batch_members)}"
            )
    member = torch.cat(
        [torch.stack([batch_members[name] for name in names]) for batch_members in members], 1
    )
    group_members = xr.DataArray(
        member.cpu().numpy(), dims=("group", "example"), coords={"group": names}
    )
    return summarise_value_scores(scores.assign_coords(token=["all", "last"]), group_members)


@checked
def summarise_value_scores(value_scores: xr.DataArray, groups: xr.DataArray) -> xr.Dataset:
    """Compute mean value scores of groups of examples, their tightness, and their distances.

    Mittal et al. 2021, "Compositional Attention", Figures 14 and 15: without a known true pairing
    (otherwise see `score_pairing`), this shows whether each search keeps to one retrieval, and
    whether different questions use different ones. The control is an untrained model, whose value
    scores are neither uniform nor equal in all groups.

    Args:
        value_scores: probabilities over `retrieval` [example, search, retrieval], with any further
            dims (`layer`, `token`), in any order.
        groups: [group, example] bool, with group names as labels: the examples of each group, which
            may overlap. A group without examples is NaN everywhere.

    Returns:
        Further dims are written as ...

        - `value_scores` [group, ..., search, retrieval]: means over the examples of a group, in
          0..1.
        - `tightness` [group, ...]: largest of these means of a search, averaged over searches: 1
          if each search has one retrieval in all examples, 1/R if scores are uniform.
        - `distance` [group, other_group, ...]: total variation distance between the means of two
          groups, averaged over searches: 0 if they are the same, 1 if no search shares a retrieval
          between them.

    Raises:
        TypeError: `groups` are not bool.
        ValueError: dims, sizes or labels do not match, or value scores are no probabilities.

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
    distance = abs(means - means.rename(group="other_group")).sum("retrieval", skipna=False) / 2
    return xr.Dataset(
        {
            "value_scores": means.assign_attrs(long_name="mean value score"),
            "tightness": means.max("retrieval")
            .mean("search")
            .assign_attrs(long_name="mean greatest share of a search"),
            "distance": distance.mean("search")
            .transpose("group", "other_group", ...)
            .assign_attrs(long_name="total variation distance between groups"),
        }
    )


def _check(value_scores: xr.DataArray, groups: xr.DataArray) -> None:
    dims = ("example", "search", "retrieval")
    if not set(dims) <= set(value_scores.dims) or 0 in value_scores.shape:
        raise ValueError(
            f"value_scores must have the dims {dims}, none of them empty, "
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
    if xr.align(value_scores, groups)[0].sizes["example"] != examples:
        raise ValueError("groups must have the labels of value_scores along 'example', got others")
    if "group" not in groups.coords:
        raise ValueError("groups must have the names of groups as labels of 'group', got none")
    if groups.dtype != bool:
        raise TypeError(f"groups must hold bool, got {groups.dtype}")
