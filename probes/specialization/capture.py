"""Capture the module choices of a router, and score its specialization and its paths by group."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import torch
import xarray as xr
from torch import Tensor

from probes.capturing.capture import capture
from probes.capturing.hooking import HookedModel
from probes.capturing.inputs import slices
from probes.capturing.passes import Batch
from probes.capturing.quantity import Quantity
from probes.checking import checked
from probes.oracle.adaptation import adapt_paths
from probes.oracle.paths import MEMORY_LIMIT, PathModel
from probes.oracle.scores import score_paths
from probes.specialization.scores import score_specialization

CHOICE = "layers.*.hook_module_choice"


@runtime_checkable
class Labelled(Protocol):
    """A batch of inputs and targets with latents, such as a task's."""

    @property
    def inputs(self) -> Tensor:
        """Inputs of the model [example, ...]."""
        ...

    @property
    def targets(self) -> Tensor:
        """Correct answers [example, ...]."""
        ...

    @property
    def latents(self) -> Mapping[str, Tensor]:
        """Ground truth by name, each [example, ...]."""
        ...


@checked
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
    """Score how the modules of a model specialize in operations, by group of examples.

    Runs the model over the batches and passes the captured choices to `score_specialization`.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        batches: objects with `.inputs` and `.latents` by group, such as the split.
        operation: name of the latent with the operation that each layer should perform [example,
            layer], or [example], the same for all layers; -1 for none.
        operations: names of the operations, or their number.
        hook: glob of activations [example, module], one per layer.
        resamples: number of bootstrap resamples.
        seed: seed of shuffling and bootstrap.

    Returns:
        The results of `score_specialization`, with `group` as first dim.

    Raises:
        KeyError: an unknown hook or latent.
        TypeError, ValueError: as in `capture` and `score_specialization`; or there are no groups.

    Example:
        >>> measure_specialization(model, {"id": [batch]}, operation="operator", operations=5)

    Source:
        Ostapenko et al. 2022, "Attention for Compositional Modularity".
    """
    scores = {}
    for group, group_batches in batches.items():
        captured = _choices(model, group_batches, hook)
        if operation not in captured:
            latents = sorted(map(str, set(captured) - {"choice"}))
            raise KeyError(f"operation must be one of {', '.join(latents)}, got {operation!r}")
        labels = captured[operation]
        scores[group] = score_specialization(
            captured["choice"],
            # `capture` does not know the names of further dims of a latent.
            labels.rename(dict(zip(labels.dims[1:], ["layer"], strict=False))),
            operations=operations,
            resamples=resamples,
            seed=seed,
        )
    return _join_groups(scores)


@checked
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
    """Score the best paths through the modules of a model and the router's, by group of examples.

    Runs the model to capture the choices of its router; see `score_paths`, and `adapt_paths` for
    the group in which paths are adapted by a few labelled examples of each task.

    Args:
        model: a `PathModel` that is also an eager HookedRootModule.
        untrained: the control, see `score_paths`.
        batches: all examples by group, such as the split.
        adapted: the group, of new tasks, in which `adapt_paths` chooses paths.
        task: name of the latent with the task of each example [example].
        examples: numbers of labelled examples per task of `adapted`, ascending, at most half of
            its examples.
        hook: glob of activations [example, module], one per layer; the largest is chosen.
        batch_size: examples per forward pass of the router.
        memory_limit: memory limit of the search, in bytes.
        resamples: number of bootstrap resamples.
        seed: seed of halves, draws and bootstrap.

    Returns:
        - `loss` [group, control, path], `regret` [group, control, layer], with `_low` and `_high`:
          see `score_paths`.
        - for the group `adapted`: `task_loss` [control, path, task], and `adapted`, `gap_closed`
          [examples], `routed`, `oracle`: see `adapt_paths`.

        Coordinate `layer`: strings.

    Raises:
        KeyError: `adapted` is no group, or a hook or latent is unknown.
        TypeError, ValueError: as in `score_paths` and `adapt_paths`.

    Example:
        >>> measure_paths(model, untrained, {"id": batch, "ood": other}, adapted="ood")

    Source:
        Ostapenko et al. 2022, "Attention for Compositional Modularity", test-time oracles.
    """
    if adapted not in batches:
        raise KeyError(f"adapted must be one of {', '.join(batches)}, got {adapted!r}")
    scores, adapted_scores = {}, xr.Dataset()
    network = cast(PathModel, model)
    for group, batch in batches.items():
        if task not in batch.latents:
            latents = ", ".join(sorted(batch.latents))
            raise KeyError(f"task must be one of the latents of {group!r}, {latents}, got {task!r}")
        chosen = _choices(model, _without_latents(batch, batch_size), hook)["choice"].argmax(
            "module"
        )
        routed = torch.from_numpy(chosen.transpose("example", "layer").to_numpy())
        options: dict[str, Any] = {"routed": routed, "task": batch.latents[task]}
        options |= {"memory_limit": memory_limit, "resamples": resamples, "seed": seed}
        scored = score_paths(network, batch.inputs, batch.targets, untrained=untrained, **options)
        scores[group] = scored.drop_dims("task")
        if group == adapted:
            adaptation = adapt_paths(
                network, batch.inputs, batch.targets, examples=examples, **options
            )
            parts = [scored[["task_loss"]], adaptation.drop_dims("repeat")]
            adapted_scores = xr.merge(parts, combine_attrs="drop_conflicts")
    joined = _join_groups(scores).assign_coords(layer=lambda data: data["layer"].astype(str))
    return xr.merge([joined, adapted_scores], combine_attrs="drop_conflicts")


@dataclass(frozen=True)
class _Examples:
    """Examples of a batch, without their latents."""

    inputs: Tensor
    latents: Mapping[str, Tensor] = field(default_factory=dict)


def _without_latents(batch: Labelled, size: int) -> Iterator[_Examples]:
    return (_Examples(batch.inputs[rows]) for rows in slices(len(batch.inputs), size))


def _choices(model: HookedModel, batches: Iterable[Batch], hook: str) -> xr.Dataset:
    """Capture `choice` [example, layer, module] and the latents."""
    quantity = Quantity(hook, dims=("example", "module"), long_name="chosen module")
    return capture(model, batches, {"choice": quantity})


def _join_groups(scores: Mapping[str, xr.Dataset]) -> xr.Dataset:
    if not scores:
        raise ValueError("batches must name at least one group, got an empty mapping")
    groups = xr.Variable("group", list(scores))
    return xr.concat(list(scores.values()), groups, combine_attrs="drop_conflicts")
