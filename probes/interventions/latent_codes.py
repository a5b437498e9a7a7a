"""The latent code: the attention weights of all heads for a query and a key.

Attention multiplies the values of a query-key pair by the weights of all heads. So these weights
choose what is computed for the pair: its latent code (Schug et al. 2024, "Attention as a
Hypernetwork", section 2).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from probes.capturing.capture import Quantity
from probes.capturing.hooking import HookedModel, layer_numbers, resolve_hooks
from probes.capturing.inputs import Inputs, count_examples
from probes.interventions.interchange import interchange

PATTERNS = "blocks.*.attn.hook_pattern"


class CodePairs(Protocol):
    """Instances with a source each, and the code that is about what both differ in.

    Such as `tasks.RavenPairs`: see the arguments of `interchange_codes`.
    """

    @property
    def base(self) -> Tensor:
        """Inputs [pair, pos, ...]."""
        ...

    @property
    def source(self) -> Tensor:
        """Inputs of the same layout."""
        ...

    @property
    def query(self) -> Int[Tensor, " pair"]:
        """The query of each pair."""
        ...

    @property
    def keys(self) -> Int[Tensor, "pair key"]:
        """Its keys."""
        ...

    @property
    def answers(self) -> Mapping[str, Tensor]:
        """Candidate answers by name."""
        ...


def latent_code(
    query: Int[Tensor, " asked"],
    keys: Int[Tensor, "asked key"],
    *,
    dims: Sequence[str] = ("query_pos", "key_pos"),
    hook: str = PATTERNS,
) -> Quantity:
    """The latent codes of chosen queries and keys, for `capture`.

    Args:
        query: positions of the queries.
        keys: for each query, the positions of the keys.
        dims: what queries and their keys are called in what is kept.
        hook: where attention patterns [example, head, query_pos, key_pos] are, a name or a glob.

    Returns:
        What keeps [example, *dims, head], with `layer` after `example` if `hook` is a glob.

    Raises:
        ValueError: `keys` has no row for each query, or there are not two dims.

    Example:
        code = latent_code(torch.tensor([8]), torch.tensor([[6, 7]]))
        capture(model, batches, {"code": code})["code"]
    """
    _check_positions(query, keys)
    if len(dims) != 2:
        raise ValueError(f"dims must name those of queries and of keys, got {tuple(dims)}")

    def reduce(pattern: Tensor) -> Tensor:
        return pattern[:, :, query[:, None], keys].permute(0, 2, 3, 1)

    return Quantity(
        hook,
        dims=("example", *dims, "head"),
        reduce=reduce,
        long_name="latent code: attention weights of chosen queries and keys",
    )


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
    """Are latent codes used? Run base instances with codes of source instances: see `interchange`.

    Patched are, in all heads, the `code`: the pattern's entries from an example's query to its
    keys; or the whole `row` of the query, to all keys; or the whole `pattern`. If that has no
    effect, what the outcomes depend on is not in the attention at all.

    Args:
        model, base_inputs, source_inputs, answer, outcomes, batch_size: see `interchange`.
        query: the query of each example.
        keys: its keys.
        n_pos: tokens of a sequence.
        hook: a glob for the attention patterns [example, head, query_pos, key_pos] of all layers.

    Returns:
        What `interchange` returns, with `scope` (code, pattern, row) before the other dims; its
        sites are "none", "layer 0", "layer 1", ... and "all layers", which are patched together.

    Raises:
        ValueError: there is not a query with its keys for each example; or see `interchange`.

    Example:
        found = interchange_codes(
            model, base, source, query=query, keys=keys, n_pos=base.shape[1],
            answer=lambda logits: logits.argmax(-1), outcomes={"source's rule": answers})
        found["rate"].sel(scope="code", site="all layers")
    """
    _check_positions(query, keys)
    if len(query) != (examples := count_examples("base_inputs", base_inputs)):
        raise ValueError(f"query must have {examples} entries, one per example, got {len(query)}")
    layers = resolve_hooks(model, hook)
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


def interchange_pairs(
    model: HookedModel,
    pairs: Mapping[str, CodePairs],
    *,
    answer: Callable[[Any], Tensor],
    hook: str = PATTERNS,
    batch_size: int = 256,
) -> xr.Dataset:
    """Are latent codes used, under several conditions? `interchange_codes` of pairs that share one.

    Args:
        model, answer, hook, batch_size: see `interchange_codes`.
        pairs: by condition, such as "other rule" and "same rule"; all with answers of one kind.

    Returns:
        [condition, scope, site, outcome] of the `rate` of `interchange_codes`, with its bounds.

    Raises:
        ValueError: there are no pairs; or see `interchange_codes`.

    Example:
        pairs = tasks.raven_pairs(task, base, source, 100)
        interchange_pairs(model, pairs, answer=lambda logits: logits.argmax(-1))
    """
    if not pairs:
        raise ValueError("pairs must name at least one condition, got an empty mapping")
    found = [
        interchange_codes(
            model,
            some.base,
            some.source,
            query=some.query,
            keys=some.keys,
            n_pos=some.base.shape[1],
            answer=answer,
            outcomes=some.answers,
            hook=hook,
            batch_size=batch_size,
        ).drop_vars("hit")
        for some in pairs.values()
    ]
    conditions = xr.Variable("condition", list(pairs))
    return cast(xr.Dataset, xr.concat(found, conditions, combine_attrs="drop_conflicts"))


def _check_positions(query: Tensor, keys: Tensor) -> None:
    if query.ndim != 1 or keys.ndim != 2 or len(keys) != len(query):
        raise ValueError(
            f"keys must have a row for each query, got shapes {tuple(keys.shape)} and "
            f"{tuple(query.shape)}"
        )
