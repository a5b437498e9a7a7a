"""Capture which modules a router chooses, and score its specialization and its paths by group."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
import xarray as xr
from torch import Tensor

from probes.capturing.capture import Batch, Quantity, capture
from probes.capturing.hooking import HookedModel
from probes.capturing.inputs import slices
from probes.oracle.adaptation import adapt_paths
from probes.oracle.paths import MEMORY_LIMIT, PathModel
from probes.oracle.scores import score_paths
from probes.specialization.scores import score_specialization

CHOICE = "layers.*.hook_module_choice"


class Labelled(Protocol):
    """A batch of inputs and targets with latents, such as a task's."""

    @property
    def inputs(self) -> Tensor:
        """What the model is called with: [example, ...]."""
        ...

    @property
    def targets(self) -> Tensor:
        """The right answers: [example, ...]."""
        ...

    @property
    def latents(self) -> Mapping[str, Tensor]:
        """Ground truth by name, each [example, ...]."""
        ...


def measure_specialization(
    model: HookedModel,
    batches: Mapping[str, Iterable[Batch]],
    *,
    operation: str,
    operations: Sequence[str] | int,
    hook: str = CHOICE,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score whether each module of a model serves one operation, in groups of examples.

    Runs the model over the batches and passes what it captures on to `score_specialization`.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        batches: objects with `.inputs` and `.latents` by group, such as the split.
        operation: the latent [example, layer] with what each layer should perform, or [example],
            the same in all layers; -1 for none.
        operations: their names, or how many there are.
        hook: a glob of activations [example, module], one for each layer.
        resamples: of the bootstrap.
        seed: of shuffling and bootstrap.

    Returns:
        What `score_specialization` returns, with a dim `group` first.

    Raises:
        KeyError: a hook or a latent that there is none of.
        TypeError, ValueError: see `capture` and `score_specialization`; no groups.

    Example:
        `measure_specialization(model, {"id": [batch]}, operation="operator", operations=5)`

    Source:
        Ostapenko et al. 2022, "Attention for Compositional Modularity".
    """
    scores = {}
    for group, some in batches.items():
        captured = _choices(model, some, hook)
        if operation not in captured:
            known = sorted(map(str, set(captured) - {"choice"}))
            raise KeyError(f"no latent {operation!r}; batches have {', '.join(known)}")
        wanted = captured[operation]
        scores[group] = score_specialization(
            captured["choice"],
            # What further dims of a latent are called is not known to `capture`.
            wanted.rename(dict(zip(wanted.dims[1:], ["layer"], strict=False))),
            operations=operations,
            resamples=resamples,
            seed=seed,
        )
    return _joined(scores)


def measure_paths(
    model: HookedModel,
    untrained: PathModel,
    batches: Mapping[str, Labelled],
    *,
    adapted: str,
    task: str = "task",
    examples: Sequence[int] = (1, 4, 16, 64),
    hook: str = CHOICE,
    batch_size: int = 1024,
    memory_limit: int = MEMORY_LIMIT,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score the best paths through a model's modules in groups of examples, beside the router's.

    Runs the model to see what its router chooses; see `score_paths`, and `adapt_paths` for the
    group in which the best path is sought with a few labelled examples of each task.

    Args:
        model: a `PathModel` that is an eager HookedRootModule too.
        untrained: the control, see `score_paths`.
        batches: by group, such as the split, all its examples.
        adapted: the group, of tasks that are new, in which `adapt_paths` chooses paths.
        task: the latent [example] with each example's task.
        examples: labelled ones of each task of `adapted`, ascending, at most half of those there.
        hook: a glob of activations [example, module], one for each layer; the greatest is chosen.
        batch_size: examples per forward pass of the router.
        memory_limit: of the search, in bytes.
        resamples: of the bootstrap.
        seed: of halves, draws and bootstrap.

    Returns:
        - `loss` [group, control, path], `regret` [group, control, layer], with `_low` and `_high`:
          see `score_paths`.
        - of the group `adapted` alone: `task_loss` [control, path, task], and `adapted`,
          `gap_closed` [examples], `routed`, `oracle`: see `adapt_paths`.

        Coordinate `layer`: strings.

    Raises:
        KeyError: `adapted` is no group; a hook or a latent that there is none of.
        TypeError, ValueError: see `score_paths` and `adapt_paths`.

    Example:
        `measure_paths(model, untrained, {"id": batch, "ood": other}, adapted="ood")`

    Source:
        Ostapenko et al. 2022, "Attention for Compositional Modularity", test-time oracles.
    """
    if adapted not in batches:
        raise KeyError(f"adapted must be one of {', '.join(batches)}, got {adapted!r}")
    scores, of_adapted = {}, xr.Dataset()
    network = cast(PathModel, model)
    for group, batch in batches.items():
        chosen = _choices(model, _parts(batch, batch_size), hook)["choice"].argmax("module")
        routed = torch.from_numpy(chosen.transpose("example", "layer").to_numpy())
        given: dict[str, Any] = {"routed": routed, "task": batch.latents[task]}
        given |= {"memory_limit": memory_limit, "resamples": resamples, "seed": seed}
        scored = score_paths(network, batch.inputs, batch.targets, untrained=untrained, **given)
        scores[group] = scored.drop_dims("task")
        if group == adapted:
            few = adapt_paths(network, batch.inputs, batch.targets, examples=examples, **given)
            both = [scored[["task_loss"]], few.drop_dims("repeat")]
            of_adapted = xr.merge(both, combine_attrs="drop_conflicts")
    joined = _joined(scores).assign_coords(layer=lambda data: data["layer"].astype(str))
    return xr.merge([joined, of_adapted], combine_attrs="drop_conflicts")


@dataclass(frozen=True)
class _Part:
    """Some examples of a batch, without their latents."""

    inputs: Tensor
    latents: Mapping[str, Tensor] = field(default_factory=dict)


def _parts(batch: Labelled, size: int) -> Iterator[_Part]:
    return (_Part(batch.inputs[some]) for some in slices(len(batch.inputs), size))


def _choices(model: HookedModel, batches: Iterable[Batch], hook: str) -> xr.Dataset:
    """`choice` [example, layer, module], and the latents."""
    quantity = Quantity(hook, dims=("example", "module"), long_name="chosen module")
    return capture(model, batches, {"choice": quantity})


def _joined(scores: Mapping[str, xr.Dataset]) -> xr.Dataset:
    if not scores:
        raise ValueError("batches must name at least one group, got an empty mapping")
    groups = xr.Variable("group", list(scores))
    return xr.concat(list(scores.values()), groups, combine_attrs="drop_conflicts")
