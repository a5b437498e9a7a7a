"""The latent code: the attention weights of all heads for a query and a key.

Attention multiplies the values of a query-key pair by the weights of all heads, so that these
weights determine what is computed for the pair: its latent code (Schug et al. 2024, "Attention as
a Hypernetwork", section 2).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from probes.capturing.hooking import HookedModel, layer_numbers
from probes.capturing.inputs import Inputs, count_examples
from probes.capturing.quantity import Quantity
from probes.checking import checked
from probes.interventions.interchange import interchange
from probes.interventions.sites import hooks_that_fire

PATTERNS = "blocks.*.attn.hook_pattern"


@runtime_checkable
class CodePairs(Protocol):
    """Pairs of base and source instances, and the position of the code in which they differ.

    For example `tasks.RavenPairs`; see the arguments of `interchange_codes`.
    """

    @property
    def base(self) -> Tensor:
        """Inputs of the base instances [pair, pos, ...]."""
        ...

    @property
    def source(self) -> Tensor:
        """Inputs of the source instances, of the same layout."""
        ...

    @property
    def query(self) -> Int[Tensor, " pair"]:
        """Position of the query of each pair."""
        ...

    @property
    def keys(self) -> Int[Tensor, "pair key"]:
        """Positions of the keys of each pair."""
        ...

    @property
    def answers(self) -> Mapping[str, Tensor]:
        """Candidate answers by name."""
        ...


@checked
def latent_code(
    query: Int[Tensor, " asked"],
    keys: Int[Tensor, "asked key"],
    *,
    dims: Sequence[str] = ("query_pos", "key_pos"),
    hook: str = PATTERNS,
) -> Quantity:
    """Make the `Quantity` that captures the latent codes of chosen queries and keys.

    Args:
        query: positions of the queries.
        keys: positions of the keys of each query.
        dims: names of the dims of queries and keys in the captured variable.
        hook: name or glob of the attention patterns [example, head, query_pos, key_pos].

    Returns:
        A quantity [example, *dims, head], with `layer` after `example` if `hook` is a glob.

    Raises:
        ValueError: `keys` does not have one row per query, or there are not two dims.

    Example:
        >>> code = latent_code(torch.tensor([8]), torch.tensor([[6, 7]]))
        >>> capture(model, batches, {"code": code})["code"]
    """
    _check_positions(query, keys)
    if len(dims) != 2:
        raise ValueError(f"dims must name two dims, of queries and of keys, got {tuple(dims)}")

    def reduce(pattern: Tensor) -> Tensor:
        return pattern[:, :, query[:, None], keys].permute(0, 2, 3, 1)

    return Quantity(
        hook,
        dims=("example", *dims, "head"),
        reduce=reduce,
        long_name="latent code: attention weights of chosen queries and keys",
    )


@checked
def interchange_codes(
    model: HookedModel,
    base_inputs: Inputs,
    source_inputs: Inputs,
    *,
    query: Int[Tensor, " example"],
    keys: Int[Tensor, "example key"],
    n_pos: int,
    answer: Callable[[Any], Tensor],
    outcomes: Mapping[str, Tensor],
    hook: str = PATTERNS,
    batch_size: int = 256,
) -> xr.Dataset:
    """Patch the latent codes of source instances into the runs on base instances.

    See `interchange`. Three scopes are patched, each in all heads: the `code` (the entries from an
    example's query to its keys), the `row` of the query (to all keys), and the whole `pattern`. If
    the last has no effect, the outcomes do not depend on the attention at all.

    Args:
        model, base_inputs, source_inputs, answer, outcomes, batch_size: as in `interchange`.
        query: position of the query of each example.
        keys: positions of the keys of each example.
        n_pos: sequence length.
        hook: glob of the attention patterns [example, head, query_pos, key_pos] of all layers.

    Returns:
        The results of `interchange`, with `scope` (code, pattern, row) as first dim; the sites are
        "none", "layer 0", "layer 1", ... and "all layers" (patched together).

    Raises:
        ValueError: `query` and `keys` do not have one row per example; or as in `interchange`.

    Example:
        >>> result = interchange_codes(
        ...     model, base.inputs, source.inputs, query=query, keys=keys, n_pos=18,
        ...     answer=lambda logits: logits.argmax(-1), outcomes={"source's rule": answers})
        >>> result["rate"].sel(scope="code", site="all layers")
    """
    _check_positions(query, keys)
    if len(query) != (examples := count_examples("base_inputs", base_inputs)):
        raise ValueError(f"query must have {examples} entries, one per example, got {len(query)}")
    layers = hooks_that_fire(model, base_inputs, hook, batch_size)
    numbers = layer_numbers(hook, layers)
    sites = {f"layer {number}": [name] for number, name in zip(numbers, layers, strict=True)}
    code = torch.zeros(examples, 1, n_pos, n_pos, dtype=torch.bool)
    code[torch.arange(examples)[:, None], 0, query.cpu()[:, None], keys.cpu()] = True
    row = code.any(-1, keepdim=True)
    return interchange(
        model,
        base_inputs,
        source_inputs,
        hooks=sites | {"all layers": layers},
        where={"code": code, "pattern": row.any(-2, keepdim=True), "row": row},
        answer=answer,
        outcomes=outcomes,
        batch_size=batch_size,
    )


@checked
def interchange_pairs(
    model: HookedModel,
    pairs: Mapping[str, CodePairs],
    *,
    answer: Callable[[Any], Tensor],
    hook: str = PATTERNS,
    batch_size: int = 256,
) -> xr.Dataset:
    """Apply `interchange_codes` to the pairs of several conditions.

    Args:
        model, answer, hook, batch_size: as in `interchange_codes`.
        pairs: pairs by condition, such as "other rule" and "same rule", with the same outcomes.

    Returns:
        `rate, rate_low, rate_high` of `interchange_codes` [condition, scope, site, outcome].

    Raises:
        ValueError: there are no conditions; or as in `interchange_codes`.

    Example:
        >>> pairs = tasks.raven_pairs(task, base, source, 100)
        >>> interchange_pairs(model, pairs, answer=lambda logits: logits.argmax(-1))
    """
    if not pairs:
        raise ValueError("pairs must name at least one condition, got an empty mapping")
    results = [
        interchange_codes(
            model,
            condition.base,
            condition.source,
            query=condition.query,
            keys=condition.keys,
            n_pos=condition.base.shape[1],
            answer=answer,
            outcomes=condition.answers,
            hook=hook,
            batch_size=batch_size,
        ).drop_vars("hit")
        for condition in pairs.values()
    ]
    conditions = xr.Variable("condition", list(pairs), {"long_name": "what was exchanged"})
    return cast(xr.Dataset, xr.concat(results, conditions, combine_attrs="drop_conflicts"))


def _check_positions(query: Tensor, keys: Tensor) -> None:
    if query.ndim != 1 or keys.ndim != 2 or len(keys) != len(query):
        raise ValueError(
            f"keys must have one row per query, got shapes {tuple(keys.shape)} and "
            f"{tuple(query.shape)}"
        )
