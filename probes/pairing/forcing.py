"""Would the right pairing mend the answer? Force the value scores to it, and measure the error."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot
from transformer_lens.utilities.statistics import derive_generator

from probes.capturing.hooking import HookedModel, check_model, evaluating, resolve_hooks
from probes.capturing.inputs import Inputs, call, count_examples, slices, take_examples
from probes.statistics.intervals import bootstrap_ratio, interval_variables

CONDITIONS = ("none", "true", "random", "hardened")
FAMILIAR = "familiar"


def force_pairing(
    model: HookedModel,
    inputs: Inputs,
    truth: Int[Tensor, "example pos true_search"],
    assignment: xr.Dataset,
    hook: str | Sequence[str],
    *,
    error: Callable[[Any, slice], Float[Tensor, " part"]],
    activation: xr.DataArray | None = None,
    batch_size: int = 256,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Set the value scores of compositional attention to the true pairing and measure the error.

    An intervention on `hook_value_scores` (Mittal et al. 2021, "Compositional Attention"): if the
    model fails on unseen combinations because it pairs the wrong retrieval with a search, then the
    right pairing, hard, removes the error; if searches or retrievals are at fault, it does not.
    Conditions, which all act on the same searches and positions, where a truth and its counterpart
    are known:

    - "none": the model as it is.
    - "true": the retrieval assigned to the truth, one-hot.
    - "random": any of the model's retrievals, one-hot, with equal chances. It removes as much
      error as "true" only if the pairing does not matter.
    - "hardened": the model's own argmax, one-hot. What this removes already is due to soft scores,
      not to wrong ones.
    - "familiar", if `activation` is given: the mean value scores that the model itself has, for the
      same truth, in another group. Where one retrieval serves several purposes, or a purpose takes
      several, no one-hot pairing is right; this removes what is due to pairing otherwise than
      there.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        inputs: what the model is called with: [example, ...] tensor, or a tuple or mapping of such
            tensors; such as a held-out split.
        truth: [example, pos, true search]: the true retrieval, or -1 where there is none.
        assignment: the model's counterparts, -1 for none: `search_assignment` [true_search] and
            `retrieval_assignment` [true_retrieval], such as those of `score_pairing` for one
            `fitted`. Take it from other examples than these.
        hook: name or glob, or several, of activations [example, pos, search, retrieval]; forced
            together.
        error: from the model's output and the slice of examples that it is for to their errors,
            [example of the slice], at least 0.
        activation: [search, true_retrieval, model_retrieval], as `score_pairing` has it, of one
            group; what is NaN there is not forced.
        batch_size: examples per forward pass.
        resamples: of the bootstrap.
        seed: of random pairings and the bootstrap.

    Returns:
        Coordinate `condition`.

        - `error` [condition, example]; `mean_error`, with `_low` and `_high` [condition].
        - `removed`, with `_low` and `_high` [condition]: the share of the error of "none" that the
          condition removes, 1 for all of it, negative if it adds some; NaN if there is no error.

        Intervals: 95%, percentile bootstrap over examples, all conditions resampled together.
        Attribute `forced`: in how many searches and positions the pairing is set.

    Raises:
        KeyError: an unknown hook; `assignment` without its variables, `activation` without its
            searches.
        TypeError: a model that cannot be hooked, `truth` that is not integers.
        ValueError: a compiled model, shapes or numbers of examples that do not fit, errors that are
            not finite and at least 0, nothing to force.
        RuntimeError: a hook did not fire exactly once in a forward pass.
    """
    check_model(model)
    patterns = [hook] if isinstance(hook, str) else hook
    names = list(dict.fromkeys(name for one in patterns for name in resolve_hooks(model, one)))
    examples = count_examples("inputs", inputs)
    if not names or batch_size < 1 or resamples < 1:
        raise ValueError(
            "hook must name at least one hook, batch_size and resamples must be at least 1, got "
            f"{hook!r}, {batch_size} and {resamples}"
        )
    searches, wanted = _counterparts(truth, assignment, examples)
    usual = None if activation is None else _usual_scores(truth, assignment, activation)
    conditions = CONDITIONS if usual is None else (*CONDITIONS, FAMILIAR)
    # Drawn for all examples at once, so that the size of a batch does not matter.
    generator = derive_generator(seed, "random pairing")
    anything = torch.rand(wanted.shape, generator=generator, dtype=torch.double)
    errors: dict[str, list[Tensor]] = {condition: [] for condition in conditions}
    with evaluating(model):
        for part in slices(examples, batch_size):
            some = take_examples(inputs, part)
            own = None if usual is None else usual[part]
            pairing = _Pairing(searches, wanted[part], anything[part], own)
            choices = (None, pairing.true, pairing.random, pairing.hardened, pairing.familiar)
            for condition, choose in zip(conditions, choices, strict=False):
                forced = names if choose is not None else []
                edits = {name: partial(pairing.force, name, choose=choose) for name in forced}
                output = call(model, some, edits)
                errors[condition].append(_check_error(error(output, part), part))
    values = torch.stack([torch.cat(chunks) for chunks in errors.values()])
    return _dataset(values, conditions, int((wanted >= 0).sum()), resamples, seed)


@dataclass(frozen=True)
class _Pairing:
    """What is forced in some examples.

    Attributes:
        searches: the searches of the model in which it is.
        wanted: the retrieval that the truth wants, -1 for nothing to force.
        anything: random numbers in [0, 1).
        usual: value scores that are usual, NaN where that is not known.
    """

    searches: Int[Tensor, " assigned"]
    wanted: Int[Tensor, "part pos assigned"]
    anything: Float[Tensor, "part pos assigned"]
    usual: Float[Tensor, "part pos assigned retrieval"] | None

    def true(self, scores: Float[Tensor, "part pos assigned retrieval"]) -> Tensor:
        return one_hot(self.wanted.clamp(min=0), scores.shape[3]).to(scores)

    def random(self, scores: Float[Tensor, "part pos assigned retrieval"]) -> Tensor:
        return one_hot((self.anything * scores.shape[3]).long(), scores.shape[3]).to(scores)

    def hardened(self, scores: Float[Tensor, "part pos assigned retrieval"]) -> Tensor:
        return one_hot(scores.argmax(3), scores.shape[3]).to(scores)

    def familiar(self, scores: Float[Tensor, "part pos assigned retrieval"]) -> Tensor:
        assert self.usual is not None
        if self.usual.shape[3] != scores.shape[3]:
            raise ValueError(
                f"activation must have {scores.shape[3]} model retrievals, as the hook has, got "
                f"{self.usual.shape[3]}"
            )
        usual = self.usual.to(scores)
        return torch.where(usual.isnan(), scores, usual)

    def force(self, name: str, activation: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """The value scores with the chosen ones where something is wanted."""
        shape, expected = tuple(activation.shape), tuple(self.wanted.shape[:2])
        least = int(self.searches.max()) + 1, int(self.wanted.max()) + 1
        if len(shape) != 4 or shape[:2] != expected or shape[2] < least[0] or shape[3] < least[1]:
            raise ValueError(
                f"the activation at {name!r} must have the shape (example, pos, search, "
                f"retrieval), {expected} as truth has and at least {least} as assignment has, "
                f"got {shape}"
            )
        searches = self.searches.to(activation.device)
        own = activation[:, :, searches]
        known = (self.wanted >= 0).to(activation.device)[..., None]
        return activation.index_copy(2, searches, torch.where(known, choose(own), own))


def _counterparts(
    truth: Tensor, assignment: xr.Dataset, examples: int
) -> tuple[Int[Tensor, " assigned"], Int[Tensor, "example pos assigned"]]:
    """The model's searches that have a true counterpart, and the retrievals wanted in them."""
    found = {}
    for name, dim in {
        "search_assignment": "true_search",
        "retrieval_assignment": "true_retrieval",
    }.items():
        if name not in assignment:
            raise KeyError(f"assignment has no variable {name!r}, only {list(assignment)}")
        if assignment[name].dims != (dim,):
            raise ValueError(
                f"assignment[{name!r}] must have the dims ({dim!r},), got {assignment[name].dims}; "
                "choose one of 'fitted'"
            )
        found[name] = torch.from_numpy(assignment[name].to_numpy().astype(np.int64))
    searches, retrievals = found.values()
    if truth.is_floating_point() or truth.dtype == torch.bool:
        raise TypeError(f"truth must hold integers, got {truth.dtype}")
    if truth.ndim != 3 or truth.shape[0] != examples or truth.shape[2] != len(searches):
        raise ValueError(
            f"truth must have the shape ({examples} examples, pos, {len(searches)} searches), "
            f"got {tuple(truth.shape)}"
        )
    if truth.min() < -1 or truth.max() >= len(retrievals):
        raise ValueError(
            f"truth must be in -1..{len(retrievals) - 1}, as assignment has it, got values in "
            f"{int(truth.min())}..{int(truth.max())}"
        )
    assigned = searches >= 0
    labels = truth.cpu()[..., assigned].long()
    wanted = torch.where(labels >= 0, retrievals[labels], -1)
    if not (wanted >= 0).any():
        raise ValueError("truth and assignment leave nothing to force: no counterpart is known")
    return searches[assigned], wanted


def _usual_scores(
    truth: Tensor, assignment: xr.Dataset, activation: xr.DataArray
) -> Float[Tensor, "example pos assigned retrieval"]:
    """The mean value scores that each truth has in `activation`."""
    dims = ("search", "true_retrieval", "model_retrieval")
    if activation.dims != dims:
        raise ValueError(f"activation must have the dims {dims}, got {activation.dims}")
    assigned = assignment["search_assignment"].to_numpy() >= 0
    names = assignment["true_search"].to_numpy()[assigned].astype(str)
    if unknown := set(names) - set(activation["search"].to_numpy()):
        raise KeyError(f"activation has no search {', '.join(sorted(unknown))}")
    usual = torch.from_numpy(activation.sel(search=names).to_numpy())
    if len(usual[0]) != assignment.sizes["true_retrieval"]:
        raise ValueError(
            f"activation must have {assignment.sizes['true_retrieval']} true retrievals, as "
            f"assignment has, got {len(usual[0])}"
        )
    labels = truth.cpu()[..., torch.from_numpy(assigned)].long()
    return usual[torch.arange(len(names)), labels.clamp(min=0)]


def _check_error(errors: Tensor, part: slice) -> Float[Tensor, " part"]:
    if not isinstance(errors, Tensor) or errors.shape != (part.stop - part.start,):
        shape = tuple(errors.shape) if isinstance(errors, Tensor) else type(errors).__name__
        raise ValueError(
            f"error must return a tensor of shape ({part.stop - part.start},), got {shape}"
        )
    if not (errors.isfinite() & (errors >= 0)).all():
        raise ValueError("error must return finite numbers of at least 0, some are not")
    return errors.detach().double().cpu()


def _dataset(
    errors: Float[Tensor, "condition example"],
    conditions: Sequence[str],
    forced: int,
    resamples: int,
    seed: int,
) -> xr.Dataset:
    each = errors.numpy().T
    ratio = partial(bootstrap_ratio, resamples=resamples, seed=seed)
    mean = ratio(each)
    removed = ratio(each, each[:, :1], transform=lambda left: 1 - left)
    result = xr.Dataset(
        {"error": (("condition", "example"), errors.numpy(), {"long_name": "error"})},
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
