"""Pointing: whether the largest attention weight among candidates is on the right one."""

from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr

from probes.checking import checked
from probes.statistics.intervals import bootstrap_ratio, interval_variables


@checked
def score_pointing(
    strongest: xr.DataArray,
    targets: Mapping[str, xr.DataArray],
    *,
    n_candidates: int,
    samples: Sequence[str] = ("example",),
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Compute how often attention heads point to a target among candidates.

    Only samples count in which all targets differ, so that pointing to one is not pointing to
    another.

    For example, the queries are tokens of one set of objects, the candidates those of another set
    in an unknown order, and the targets are the corresponding token and the token at the same
    position. Attention that finds correspondences points to the former, wherever it is.

    Args:
        strongest: [samples..., ...], the number of the candidate with the largest attention
            weight, 0 to n_candidates - 1; its other dims are, for example, layer and head.
        targets: by name the number of a candidate [samples..., ...]; all dims must be dims of
            `strongest`, with their labels. Samples that do not count may have any numbers.
        n_candidates: number of candidates.
        samples: dims that together index a sample, the example first.
        resamples: number of bootstrap resamples.
        seed: seed of the control and of the bootstrap.

    Returns:
        `share, share_low, share_high` [control, target, ...], in 0..1, with percentile bootstrap
        95% intervals over examples; NaN if no sample counts. `control`: "observed", or "shuffled",
        with the targets of other examples, as if attention did not depend on the example's order.
        `chance` []: 1 / n_candidates.

    Raises:
        ValueError: there are no targets, candidates or samples; dims, sizes or labels do not fit;
            or a number of a candidate, in a sample that counts, is none.

    Example:
        >>> targets = {"corresponding": truth, "same position": position}
        >>> scores = score_pointing(strongest, targets, n_candidates=4)
        >>> scores["share"].sel(control="observed", target="corresponding").max("head")
    """
    if not targets:
        raise ValueError("targets must name at least one target, got an empty mapping")
    for name, target in targets.items():
        if extra := set(target.dims) - set(strongest.dims):
            names = sorted(map(str, extra))
            raise ValueError(
                f"dims of targets[{name!r}] must be some of {strongest.dims}, got {names}"
            )
    if not samples:
        raise ValueError("samples must name at least one dim, the example first, got none")
    if missing := [dim for dim in samples if dim not in strongest.dims]:
        raise ValueError(f"samples must be dims of strongest, {strongest.dims}, got {missing}")
    if n_candidates < 1:
        raise ValueError(f"n_candidates must be at least 1, got {n_candidates}")
    for name, target in targets.items():
        for dim in target.dims:
            _check_labels(f"targets[{name!r}]", target, strongest, str(dim))
    differ = _differ(list(targets.values()))
    _check_numbers("strongest", strongest, differ, n_candidates)
    for name, target in targets.items():
        _check_numbers(f"targets[{name!r}]", target, differ, n_candidates)
    example, *others = samples
    order = np.random.default_rng(seed).permutation(strongest.sizes[example])
    table = xr.Dataset({str(number): target for number, target in enumerate(targets.values())})
    dims = [dim for dim in strongest.dims if dim not in samples]
    one_of_each = strongest.isel(dict.fromkeys(dims, 0), drop=True)
    # A target may be the same in all examples.
    table["counted"] = differ.broadcast_like(one_of_each)
    parts = []
    for shuffled in (False, True):
        shown = table.isel({example: order}) if shuffled else table
        if shuffled and example in shown.coords:
            shown = shown.assign_coords({example: table[example]})
        hits = [
            ((strongest == shown[str(number)]) & shown["counted"]) for number in range(len(targets))
        ]
        counted = shown["counted"].broadcast_like(strongest)
        parts.append([(hit.sum(others), counted.sum(others)) for hit in hits])

    def stack(which: int) -> np.ndarray:
        arrays = [[pair[which].transpose(example, *dims) for pair in row] for row in parts]
        return np.moveaxis(np.array([[array.to_numpy() for array in row] for row in arrays]), 2, 0)

    interval = bootstrap_ratio(stack(0), stack(1), resamples=resamples, seed=seed)
    long_name = "share of samples in which the largest attention weight is on the target"
    coords = {
        "control": ["observed", "shuffled"],
        "target": list(targets),
        **{str(dim): strongest[dim] for dim in dims if dim in strongest.coords},
    }
    variables = interval_variables(
        "share", interval, ("control", "target", *map(str, dims)), long_name=long_name
    )
    about = {"long_name": "share if each candidate is as likely"}
    attrs = {
        "samples": int(table["counted"].sum()),
        "seed": seed,
        "interval": f"percentile bootstrap over examples, 95%, {resamples} resamples",
    }
    return xr.Dataset(variables | {"chance": ((), 1 / n_candidates, about)}, coords, attrs)


def _differ(targets: Sequence[xr.DataArray]) -> xr.DataArray:
    """Whether all targets of a sample differ from one another."""
    differs = xr.ones_like(targets[0], dtype=bool)
    for number, target in enumerate(targets):
        for other in targets[:number]:
            differs = differs & (target != other)
    return differs


def _check_labels(name: str, target: xr.DataArray, strongest: xr.DataArray, dim: str) -> None:
    """Raise a ValueError unless a dim has the size of `strongest`, and its labels in any order."""
    fits = target.sizes[dim] == strongest.sizes[dim]
    if fits and dim in target.coords and dim in strongest.coords:
        fits = {*target[dim].to_numpy().tolist()} == {*strongest[dim].to_numpy().tolist()}
    if not fits:
        raise ValueError(
            f"{name} must have the {strongest.sizes[dim]} labels of {dim!r} of strongest, got "
            f"{target.sizes[dim]}, or others"
        )


def _check_numbers(name: str, numbers: xr.DataArray, counted: xr.DataArray, n: int) -> None:
    """Raise a ValueError unless all numbers, in samples that count, are those of candidates."""
    wrong = counted & ~((numbers >= 0) & (numbers < n) & (numbers % 1 == 0))
    if wrong.any():
        every = numbers.broadcast_like(wrong).transpose(*wrong.dims).to_numpy()
        raise ValueError(
            f"{name} must be integers from 0 to n_candidates - 1 = {n - 1} in samples that count, "
            f"got {every[wrong.to_numpy()][0]}"
        )
