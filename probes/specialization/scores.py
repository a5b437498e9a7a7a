"""Scores of how modules specialize in operations: specialization, collapse and controls."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot
from transformer_lens.utilities.statistics import derive_generator

from probes.checking import check_labels, checked
from probes.decoding.fitting import one_thread
from probes.specialization.information import SCORES, LayerTables, Routings, score_layers
from probes.statistics.intervals import Interval, interval_variables

POOLED = "pooled"

_DIMS = ("example", "layer", "module")
# Rows of bfloat16 probabilities sum to 1 within 0.004.
_TOLERANCE = 1e-2


@checked
def score_specialization(
    routing: xr.DataArray,
    operation: xr.DataArray,
    *,
    operations: Sequence[str] | int,
    dead_share: float = 0.0,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score how routing follows the operation that each layer should perform.

    Ostapenko et al. 2022, "Attention for Compositional Modularity". The activation matrix A
    [operation, module] holds the mean routing of each operation. With M modules, S the operations
    that occur, and H the entropy:

    - `specialization` = 1 - mean over S of H(A_i) / log M, and `collapse` = H(mean over S of A_i)
      / log M, both in 0..1. In the paper's terms 1 is good for both. Specialization alone says
      little: it is 1 if all examples go to one module, but then collapse is 0.
    - `collapse_attainable`: the same entropy / log min(|S|, M). The paper's ideal, collapse 1, is
      out of reach for |S| < M, since collapse <= log |S| / log M + 1 - specialization: one module
      for each operation gives 0.47 for 5 of 30, and 1 here; more than 1 means more modules than
      operations. The paper's figure 9b (0.92 and 0.98 with |S| = 10) violates that bound at M =
      30, and so does not follow from its formula.
    - `normalised_mutual_information` (over the mean of both entropies) and
      `adjusted_mutual_information` (Vinh et al. 2010: 0 expected by chance, at most 1) between the
      operation and the chosen module, the most probable one (the first in case of a tie).
    - `assignment_accuracy`: share routed to the operation's module by the best one-to-one
      assignment of operations to modules (Kuhn 1955), in 0..1. Fitted and scored on the same
      examples, so that it is above 1 / M by chance.

    The control "shuffled" permutes the operations of a layer among its examples, which gives the
    scores of a routing that ignores the operation. Where it is as high as "observed",
    specialization is due to collapse, or to few examples per operation.

    Args:
        routing: [example, layer, module], in any order: probabilities, each row sums to 1 (within
            0.01), or to less, as the largest k of them do; or integers, such as one-hot choices,
            0/1 for the top k, or counts. Rows are divided by their sums. Further dims (`pos`) hold
            several routings per example. For a mixture of experts:
            `blocks.*.mlp.hook_expert_weights`, captured with dims ("example", "pos", "module").
        operation: [example, layer] int, in 0..operations - 1, or -1 for none (padding), which is
            left out. May have the further dims of `routing`; missing dims are broadcast (one label
            for all layers).
        operations: names of the operations, or their number.
        dead_share: a module is dead if its share of choices is at most this, in [0, 1).
        resamples: number of bootstrap resamples.
        seed: seed of shuffling and bootstrap.

    Returns:
        Coordinates `control` ("observed", "shuffled"), `layer` (strings; last "pooled", all layers
        together, which is meaningful if they share their modules), `operation`, `module`.

        - each score above, with `_low` and `_high` [control, layer]: its 95% interval over
          examples, by the basic bootstrap. Entropies of few examples are biased downwards, and in
          resamples twice so, which percentile intervals would not correct; where that bias exceeds
          the spread, the interval is widened to contain the score. With few examples of an
          operation (about 100) its coverage is only 70 to 90%. The assignment is held fixed. NaN
          where a score is undefined: with one module; with one operation, for
          `collapse_attainable` and mutual information; without any operation. The bounds of the
          adjusted one are also NaN where chance accounts for half of the maximum.
        - `activation` [layer, operation, module]: A, in 0..1; NaN where the operation does not
          occur. `seen` [layer, operation]: number of its occurrences. `unseen` [layer]: number of
          operations that do not occur, and so are not in S.
        - `assignment` [layer, operation]: index of the assigned module; -1 if the operation is
          never routed to it.
        - `utilisation` [layer, module]: share of choices of the module. `dead` [layer]: number of
          dead modules.
        - `defined` [layer]: 1 where specialization and collapse are defined, else 0.

    Raises:
        TypeError: operations are not integers.
        ValueError: dims or sizes do not match, routing is neither probabilities nor integers, or
            an operation or a number is out of range.

    Example:
        >>> score_specialization(data["choice"], data["operation"], operations=5)["specialization"]
    """
    names = _operation_names(operations)
    if not 0 <= dead_share < 1:
        raise ValueError(f"dead_share must be in [0, 1), got {dead_share}")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    layers = _read(routing, operation, len(names))
    generator = derive_generator(seed, "operations")
    score = partial(
        score_layers,
        examples=routing.sizes["example"],
        operations=len(names),
        resamples=resamples,
        seed=seed,
    )
    with one_thread():
        tables, observed = score(layers)
        _, shuffled = score([layer.shuffled(generator) for layer in layers])
    result = xr.Dataset(
        coords={
            "control": ["observed", "shuffled"],
            "layer": [*map(str, routing["layer"].to_numpy()), POOLED],
            "operation": names,
            "module": routing["module"].to_numpy(),
        },
        attrs={
            "long_name": "specialization of modules in operations",
            "dead_share": dead_share,
            "seed": seed,
            "interval": f"basic bootstrap over examples, 95%, {resamples} resamples",
        },
    )
    result["control"].attrs["long_name"] = "whose operations"
    result["layer"].attrs["long_name"] = "layer, or all layers together"
    result["operation"].attrs["long_name"] = "operation that should be performed"
    result["module"].attrs["long_name"] = "module"
    by_control = np.stack([observed, shuffled], axis=1)  # [end, control, layer, score]
    for number, (name, long_name) in enumerate(SCORES.items()):
        interval = Interval(*by_control[..., number])
        result.update(interval_variables(name, interval, ("control", "layer"), long_name=long_name))
    return result.assign(_describe(tables, dead_share))


def _describe(observed: list[LayerTables], dead_share: float) -> Mapping[str, xr.Variable]:
    """Describe the observed routing: activation, assignment and utilisation."""
    routed = np.stack([layer.routed.numpy() for layer in observed])
    chosen = np.stack([layer.chosen.numpy() for layer in observed])
    occurrences = chosen.sum(axis=2)
    total = occurrences.sum(axis=1, keepdims=True)
    # 0 / 0 is NaN where no operation occurs.
    with np.errstate(invalid="ignore"):
        activation = routed / occurrences[..., None]
        utilisation = chosen.sum(axis=1) / total
    defined = (total[:, 0] > 0) & (chosen.shape[2] > 1)
    variables = {
        "activation": (
            ("layer", "operation", "module"),
            activation,
            "mean routing of the operation",
        ),
        "seen": (("layer", "operation"), occurrences, "how often the operation occurs"),
        "unseen": (("layer",), (occurrences == 0).sum(axis=1), "operations that do not occur"),
        "assignment": (
            ("layer", "operation"),
            np.stack([layer.assignment.numpy() for layer in observed]),
            "index of the module assigned to the operation",
        ),
        "utilisation": (("layer", "module"), utilisation, "share in which the module is chosen"),
        "dead": (("layer",), (utilisation <= dead_share).sum(axis=1), "modules hardly ever chosen"),
        "defined": (
            ("layer",),
            defined.astype(np.int8),
            "whether specialization and collapse are defined",
        ),
    }
    return {
        name: xr.Variable(dims, values, {"long_name": long_name})
        for name, (dims, values, long_name) in variables.items()
    }


def _operation_names(operations: Sequence[str] | int) -> Sequence[str] | Int[np.ndarray, " name"]:
    if isinstance(operations, int):
        if operations < 1:
            raise ValueError(f"operations must be at least 1, got {operations}")
        return np.arange(operations)
    if not operations or len(set(operations)) < len(operations):
        raise ValueError(f"operations must be one or more distinct names, got {operations!r}")
    return list(operations)


def _read(routing: xr.DataArray, operation: xr.DataArray, operations: int) -> list[Routings]:
    """Read the routings of each layer that have an operation."""
    if not set(_DIMS) <= set(routing.dims) or 0 in routing.shape:
        raise ValueError(
            f"routing must have the dims {_DIMS}, none of them empty, got {dict(routing.sizes)}"
        )
    extra_dims = [dim for dim in routing.dims if dim not in _DIMS]
    dims = ["layer", "example", *extra_dims]
    if "example" not in operation.dims or not set(operation.dims) <= set(dims):
        raise ValueError(
            f"operation must have the dim 'example', and others only of {dims}, "
            f"got {operation.dims}"
        )
    for dim in operation.dims:
        if operation.sizes[dim] != routing.sizes[dim]:
            raise ValueError(
                f"operation must have {routing.sizes[dim]} values along {dim!r}, as routing has, "
                f"got {operation.sizes[dim]}"
            )
        check_labels("operation", operation, "routing", routing, dim)
    if operation.dtype.kind not in "iu":
        raise TypeError(f"operation must hold integers, got {operation.dtype}")
    missing = {dim: routing.sizes[dim] for dim in dims if dim not in operation.dims}
    ordered = operation.drop_vars(list(operation.coords)).expand_dims(missing).transpose(*dims)
    labels = ordered.to_numpy().reshape(routing.sizes["layer"], -1).astype(np.int64)
    if labels.min() < -1 or labels.max() >= operations:
        raise ValueError(
            f"operation must be in -1..{operations - 1}, got values in "
            f"{labels.min()}..{labels.max()}"
        )
    values = routing.transpose(*dims, "module").to_numpy()
    values = values.reshape(*labels.shape, -1).astype(np.float64)
    has_operation = labels >= 0
    probabilities = _normalised(values[has_operation])
    choice = one_hot(probabilities.argmax(dim=1), values.shape[2]).double()
    use = torch.stack([probabilities, choice], dim=1)
    examples = routing.sizes["example"]
    example = torch.arange(examples).repeat_interleave(labels.shape[1] // examples)
    sizes = has_operation.sum(axis=1).tolist()
    return [
        Routings(
            layer_use, torch.from_numpy(layer_labels[selected]), example[torch.from_numpy(selected)]
        )
        for layer_use, layer_labels, selected in zip(
            use.split(sizes), labels, has_operation, strict=True
        )
    ]


def _normalised(
    rows: Float[np.ndarray, "token module"],
) -> Float[Tensor, "token module"]:
    """Divide the rows by their sums.

    Raises:
        ValueError: rows are not all probabilities, or all integers with a sum above zero.
    """
    sums = rows.sum(axis=1, keepdims=True)
    is_valid = np.isfinite(rows).all(axis=1) & (rows >= 0).all(axis=1) & (sums[:, 0] > 0)
    if not (rows == np.round(rows)).all():
        is_valid &= sums[:, 0] <= 1 + _TOLERANCE
    if not is_valid.all():
        first = int((~is_valid).argmax())
        raise ValueError(
            "routing must hold, over the dim 'module', probabilities that sum to at most 1, or "
            f"integers (choices, counts) of at least 0, not all 0, got {int((~is_valid).sum())} of "
            f"{len(rows)} rows that do not: the first holds "
            f"{rows[first].min():g}..{rows[first].max():g} and sums to {sums[first, 0]:g}"
        )
    return torch.from_numpy(rows / sums)
