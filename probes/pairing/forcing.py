"""Force the value scores to the true pairing and measure the error."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot
from transformer_lens.utilities.statistics import derive_generator

from probes.capturing.hooking import HookedModel, check_model, evaluating
from probes.capturing.inputs import Edit, Inputs, call, count_examples, once, slices, take_rows
from probes.checking import checked
from probes.interventions.answers import Metric, check_metric, measure, metric_variables
from probes.interventions.readers import check_read
from probes.interventions.sites import hooks_that_fire
from probes.progress import progress
from probes.statistics.intervals import bootstrap_ratio, interval_variables

CONDITIONS = ("none", "true", "random", "hardened")
FAMILIAR = "familiar"


@checked
def force_pairing(
    model: HookedModel,
    inputs: Inputs,
    truth: Int[Tensor, "example pos true_search"],
    assignment: xr.Dataset,
    hook: str | Sequence[str],
    *,
    error: Metric,
    metrics: Mapping[str, Metric] | None = None,
    activation: xr.DataArray | None = None,
    batch_size: int = 256,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Set the value scores of compositional attention to the true pairing and measure the error.

    An intervention on `hook_value_scores` (Mittal et al. 2021, "Compositional Attention"): if the
    model fails on unseen combinations because it pairs a search with the wrong retrieval, forcing
    the true pairing removes the error; if searches or retrievals are at fault, it does not. All
    conditions act on the same searches and positions, where the truth and its counterpart in the
    model are known:

    - "none": the unchanged model.
    - "true": the retrieval assigned to the truth, one-hot.
    - "random": a random retrieval of the model, one-hot, with equal probabilities. It removes as
      much error as "true" only if the pairing does not matter.
    - "hardened": the model's argmax, one-hot. It removes the error due to soft scores.
    - "familiar", if `activation` is given: the model's mean value scores for the same truth in
      another group. Where one retrieval serves several purposes, or one purpose takes several, no
      one-hot pairing is correct; this removes the error due to a pairing other than in that group.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        inputs: inputs of the model, such as a held-out split: a tensor [example, ...], or a tuple
            or mapping of them.
        truth: true retrieval [example, pos, true search], or -1 for none.
        assignment: the model's counterparts, -1 for none: `search_assignment` [true_search] and
            `retrieval_assignment` [true_retrieval], such as those of `score_pairing` for one
            `fitted`. Should be fitted on other examples.
        hook: name or glob, or several, of activations [example, pos, search, retrieval]; forced
            together.
        error: maps the model's output and the slice of its examples to their errors [example of
            the slice], at least 0.
        metrics: further numbers by name: functions like `error`, of any sign, such as a difference
            of logits or a probability.
        activation: `activation` of `score_pairing` [search, true_retrieval, model_retrieval] for
            one group; NaN is not forced.
        batch_size: examples per forward pass.
        resamples: number of bootstrap resamples.
        seed: seed of random pairings and the bootstrap.

    Returns:
        Coordinate `condition`.

        - `error` [condition, example]; `mean_error`, with `_low` and `_high` [condition].
        - `removed`, with `_low` and `_high` [condition]: share of the error of "none" that the
          condition removes: 1 for all of it, negative if it adds error; NaN if there is no error.
        - with metrics, `value` and `change` [condition, metric]: their mean, and that of the
          difference to "none", with `_low` and `_high`; `example_value` [condition, metric,
          example].

        Intervals: 95%, percentile bootstrap over examples, all conditions resampled together.
        Attribute `forced`: number of searches and positions with a forced pairing.

    Raises:
        KeyError: an unknown hook, or `assignment` lacks a variable, or `activation` a search.
        TypeError: the model cannot be hooked, or `truth` is not integers.
        ValueError: the model is compiled, shapes or numbers of examples do not match, errors are
            not finite or negative, there is nothing to force, or nothing reads the value scores.
        RuntimeError: a hook did not fire exactly once in a forward pass.

    Example:
        >>> hook = "blocks.0.attn.hook_value_scores"
        >>> forced = force_pairing(model, inputs, truth, assignment, hook, error=error)
        >>> forced["removed"]
    """
    check_model(model)
    patterns = [hook] if isinstance(hook, str) else hook
    examples = count_examples("inputs", inputs)
    if not patterns or batch_size < 1 or resamples < 1:
        raise ValueError(
            "hook must name at least one hook, batch_size and resamples must be at least 1, got "
            f"{hook!r}, {batch_size} and {resamples}"
        )
    names = list(
        dict.fromkeys(
            name
            for pattern in patterns
            for name in hooks_that_fire(model, inputs, pattern, batch_size)
        )
    )
    check_read(model, inputs, [names], batch_size)
    searches, targets = _counterparts(truth, assignment, examples)
    familiar_scores = (
        None if activation is None else _familiar_scores(truth, assignment, activation)
    )
    conditions = CONDITIONS if familiar_scores is None else (*CONDITIONS, FAMILIAR)
    # Drawn for all examples at once, so that the batch size does not matter.
    generator = derive_generator(seed, "random pairing")
    random_numbers = torch.rand(targets.shape, generator=generator, dtype=torch.double)
    numbers: dict[str, list[np.ndarray]] = {condition: [] for condition in conditions}
    errors: dict[str, list[np.ndarray]] = {condition: [] for condition in conditions}
    with evaluating(model):
        for rows in progress(slices(examples, batch_size), "force pairing"):
            batch = take_rows(inputs, rows)
            batch_scores = None if familiar_scores is None else familiar_scores[rows]
            pairing = _Pairing(searches, targets[rows], random_numbers[rows], batch_scores)
            choices = (None, pairing.true, pairing.random, pairing.hardened, pairing.familiar)
            for condition, choose in zip(conditions, choices, strict=False):
                output = call(model, batch, pairing.edits(names, choose))
                errors[condition].append(check_metric("error", error(output, rows), rows))
                numbers[condition].append(measure(metrics or {}, output, rows))
    values = np.stack([np.concatenate(parts) for parts in errors.values()])
    result = _dataset(values, conditions, int((targets >= 0).sum()), resamples, seed)
    if metrics:
        values = np.stack([np.concatenate(parts, axis=1) for parts in numbers.values()])
        result = result.assign_coords(metric=list(metrics)).assign(
            metric_variables(values, ("condition", "metric"), resamples=resamples, seed=seed)
        )
    return result


@dataclass(frozen=True)
class _Pairing:
    """The pairing to force in a batch of examples.

    Attributes:
        searches: searches of the model in which the pairing is forced.
        targets: retrieval assigned to the truth, -1 for nothing to force.
        random_numbers: random numbers in [0, 1).
        familiar_scores: mean value scores of another group, NaN where unknown.
    """

    searches: Int[Tensor, " assigned"]
    targets: Int[Tensor, "batch pos assigned"]
    random_numbers: Float[Tensor, "batch pos assigned"]
    familiar_scores: Float[Tensor, "batch pos assigned retrieval"] | None

    def true(self, scores: Float[Tensor, "batch pos assigned retrieval"]) -> Tensor:
        return one_hot(self.targets.clamp(min=0), scores.shape[3]).to(scores)

    def random(self, scores: Float[Tensor, "batch pos assigned retrieval"]) -> Tensor:
        return one_hot((self.random_numbers * scores.shape[3]).long(), scores.shape[3]).to(scores)

    def hardened(self, scores: Float[Tensor, "batch pos assigned retrieval"]) -> Tensor:
        return one_hot(scores.argmax(3), scores.shape[3]).to(scores)

    def familiar(self, scores: Float[Tensor, "batch pos assigned retrieval"]) -> Tensor:
        assert self.familiar_scores is not None
        if self.familiar_scores.shape[3] != scores.shape[3]:
            raise ValueError(
                f"activation must have {scores.shape[3]} model retrievals, like the hook, got "
                f"{self.familiar_scores.shape[3]}"
            )
        replacement = self.familiar_scores.to(scores)
        return torch.where(replacement.isnan(), scores, replacement)

    def edits(
        self, names: Sequence[str], choose: Callable[[Tensor], Tensor] | None
    ) -> dict[str, Edit]:
        """Make the edits of `call` that force the chosen scores; none without a choice."""
        if choose is None:
            return {}
        return {name: once(name, partial(self.force, name, choose=choose)) for name in names}

    def force(self, name: str, activation: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """Replace the value scores by the chosen ones where there is a target."""
        shape, expected = tuple(activation.shape), tuple(self.targets.shape[:2])
        smallest = int(self.searches.max()) + 1, int(self.targets.max()) + 1
        if (
            len(shape) != 4
            or shape[:2] != expected
            or shape[2] < smallest[0]
            or shape[3] < smallest[1]
        ):
            raise ValueError(
                f"the activation at {name!r} must have the shape (example, pos, search, "
                f"retrieval), {expected} like truth and at least {smallest} like assignment, "
                f"got {shape}"
            )
        searches = self.searches.to(activation.device)
        current = activation[:, :, searches]
        is_forced = (self.targets >= 0).to(activation.device)[..., None]
        return activation.index_copy(2, searches, torch.where(is_forced, choose(current), current))


def _counterparts(
    truth: Tensor, assignment: xr.Dataset, examples: int
) -> tuple[Int[Tensor, " assigned"], Int[Tensor, "example pos assigned"]]:
    """Find the model's searches with a true counterpart, and the true retrievals in them."""
    assignments = {}
    for name, dim in {
        "search_assignment": "true_search",
        "retrieval_assignment": "true_retrieval",
    }.items():
        if name not in assignment:
            raise KeyError(f"assignment must hold {name!r}, got {list(assignment)}")
        if assignment[name].dims != (dim,):
            raise ValueError(
                f"assignment[{name!r}] must have the dims ({dim!r},), got {assignment[name].dims}; "
                "choose one of 'fitted'"
            )
        assignments[name] = torch.from_numpy(assignment[name].to_numpy().astype(np.int64))
    searches, retrievals = assignments.values()
    if truth.is_floating_point() or truth.dtype == torch.bool:
        raise TypeError(f"truth must hold integers, got {truth.dtype}")
    if truth.ndim != 3 or truth.shape[0] != examples or truth.shape[2] != len(searches):
        raise ValueError(
            f"truth must have the shape ({examples} examples, pos, {len(searches)} searches), "
            f"got {tuple(truth.shape)}"
        )
    if truth.min() < -1 or truth.max() >= len(retrievals):
        raise ValueError(
            f"truth must be in -1..{len(retrievals) - 1}, like assignment, got values in "
            f"{int(truth.min())}..{int(truth.max())}"
        )
    assigned = searches >= 0
    labels = truth.cpu()[..., assigned].long()
    targets = torch.where(labels >= 0, retrievals[labels], -1)
    if not (targets >= 0).any():
        raise ValueError("truth and assignment must share a counterpart to force, got none")
    return searches[assigned], targets


def _familiar_scores(
    truth: Tensor, assignment: xr.Dataset, activation: xr.DataArray
) -> Float[Tensor, "example pos assigned retrieval"]:
    """Look up the mean value scores of each truth in `activation`."""
    dims = ("search", "true_retrieval", "model_retrieval")
    if activation.dims != dims:
        raise ValueError(f"activation must have the dims {dims}, got {activation.dims}")
    assigned = assignment["search_assignment"].to_numpy() >= 0
    names = assignment["true_search"].to_numpy()[assigned].astype(str)
    if unknown := set(names) - set(activation["search"].to_numpy()):
        raise KeyError(
            f"activation must have the searches {', '.join(names)}, "
            f"lacks {', '.join(sorted(unknown))}"
        )
    scores = torch.from_numpy(activation.sel(search=names).to_numpy())
    if len(scores[0]) != assignment.sizes["true_retrieval"]:
        raise ValueError(
            f"activation must have {assignment.sizes['true_retrieval']} true retrievals, like "
            f"assignment, got {len(scores[0])}"
        )
    labels = truth.cpu()[..., torch.from_numpy(assigned)].long()
    return scores[torch.arange(len(names)), labels.clamp(min=0)]


def _dataset(
    errors: Float[np.ndarray, "condition example"],
    conditions: Sequence[str],
    forced: int,
    resamples: int,
    seed: int,
) -> xr.Dataset:
    if (errors < 0).any():
        raise ValueError(f"error must be at least 0, got {errors.min()}")
    by_example = errors.T
    ratio = partial(bootstrap_ratio, resamples=resamples, seed=seed)
    mean = ratio(by_example)
    removed = ratio(by_example, by_example[:, :1], transform=lambda left: 1 - left)
    result = xr.Dataset(
        {"error": (("condition", "example"), errors, {"long_name": "error"})},
        coords={"condition": list(conditions)},
        attrs={
            "forced": forced,
            "seed": seed,
            "interval": f"percentile bootstrap over examples, 95%, {resamples} resamples",
        },
    )
    result["condition"].attrs["long_name"] = "what the value scores are set to"
    return result.assign(
        interval_variables("mean_error", mean, "condition", long_name="mean error")
        | interval_variables(
            "removed", removed, "condition", long_name="share of the error that is removed"
        )
    )
