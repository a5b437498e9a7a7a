"""Measures of models of fuzzy logic: what the latent code of the queried token knows.

The same point is asked for in all sequences, so that codes differ by the function and the points
before it. The paper decodes the attention of the queried token to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr

import probes
import tasks
from studies.engine import Trained


def code_of_query(pattern: torch.Tensor) -> torch.Tensor:
    """The latent code of the queried token: [example, key, head].

    Its attention weight to itself, and the mean of those to the points with known values.
    """
    last = pattern[:, :, -1]
    return torch.stack([last[:, :, -1], last[:, :, :-1].mean(-1)], dim=1)


def codes_of(model: Any, task: tasks.FuzzyLogic, batches: Iterable[tasks.Batch]) -> xr.Dataset:
    """Latent codes with the composition of the functions.

    `code` [example, layer, key, head], of the queried token's attention to itself ("self") and to
    the other points ("others"); and what can be decoded from it, [example, ...]:
    `target` [label]: for each term whether the function has it, then for each variable the share of
    terms in which it is not negated;
    `has` [term]: whether the function has the term;
    `literal` [number]: for each variable of the first term, then of the second, ..., whether it is
    not negated;
    `first_term`, `function`, `value`: the first term, the function, and the value asked for.
    """
    quantity = probes.Quantity(
        "blocks.*.attn.hook_pattern",
        dims=("example", "key", "head"),
        reduce=code_of_query,
        long_name="latent code of the queried token",
    )
    batches = list(batches)
    data = probes.capture(model, batches, {"code": quantity})
    n_terms, n_variables = task.conjunctions.shape
    terms, literals = data["terms"].to_numpy(), data["literals"].to_numpy()
    has = (terms[:, :, None] == np.arange(n_terms)).any(1)
    target = np.concatenate([has.astype(float), literals.mean(1)], axis=1)
    names = [f"term {n}" for n in range(n_terms)] + [f"variable {n}" for n in range(n_variables)]
    literal = literals.reshape(len(literals), -1).astype(float)
    # Not the captured number, which counts within a split.
    _, function = np.unique(terms, axis=0, return_inverse=True)
    labels = {
        "target": (("example", "label"), target),
        "has": (("example", "term"), has),
        "literal": (("example", "number"), literal),
        "first_term": ("example", terms[:, 0]),
        "function": ("example", function.reshape(-1)),
        "value": ("example", torch.cat([batch.targets[:, 0] for batch in batches]).cpu().numpy()),
    }
    coordinates = {"label": names, "key": ["self", "others"]}
    coordinates |= {"term": range(n_terms), "number": range(literal.shape[1])}
    return data[["code"]].assign(labels).assign_coords(coordinates)


def fixed(trained: Trained, split: str, n: int) -> list[tasks.Batch]:
    """New sequences of a split, all with the same queried point."""
    return [trained.task.with_fixed_query(batch) for batch in trained.batches(split, n)]


def _decode(
    trained: Trained,
    n: int,
    decode: Callable[..., xr.Dataset],
    label: str,
    along: str,
    keys: tuple[str, ...],
) -> xr.Dataset:
    """Decode labels from codes, fitted on `id` and scored on further sequences of all splits."""
    splits = trained.setup.splits
    fit, *tests = (fixed(trained, split, n) for split in ("id", *splits))

    def codes(model: Any) -> tuple[xr.Dataset, dict[str, xr.Dataset]]:
        known, *scored = (
            codes_of(model, trained.task, batches).sel(key=list(keys)) for batches in (fit, *tests)
        )
        return known, dict(zip(splits, scored, strict=True))

    return probes.decode_each(
        *codes(trained.model),
        decoder=decode,
        label=label,
        along=along,
        untrained=codes(trained.untrained),
        resamples=200,
        seed=trained.seed,
    )


def terms(trained: Trained, n: int = 2000) -> xr.Dataset:
    """The paper's decoder: which terms a function has, by logistic regression, scored by F1.

    From the attention of the queried token to itself. Decoders are fitted on training combinations
    (`id`); `test`, the paper's held-out tasks, has other combinations of these terms, and `ood`
    none of them. `f1`: the mean F1 over terms.

    Args:
        trained: the trained model and its untrained control.
        n: sequences for fitting, and for scoring on each split.
    """
    decode = partial(probes.decode, positive=True)
    scores = _decode(trained, n, decode, "has", "term", ("self",))
    f1 = scores["score"].sel(metric="f1", drop=True).mean("term")
    about = {"long_name": "F1 of decoding the terms of a function, mean over terms"}
    kept = scores.drop_dims(["true", "predicted"])
    return kept.assign(f1=f1.assign_attrs(about))


def literals(trained: Trained, n: int = 2000) -> xr.Dataset:
    """The published code's decoder: the literals of a function's terms, by ridge regression.

    From the attention of the queried token to itself, of all layers. The code has a fixed strength
    of the penalty, 1, on codes that are not standardised, and stops after ten iterations; here the
    strength is chosen by cross-validation. `mean_r2`: the mean R^2 over literals.

    Args:
        trained: the trained model and its untrained control.
        n: sequences for fitting, and for scoring on each split.
    """
    scores = _decode(trained, n, probes.decode_continuous, "literal", "number", ("self",))
    mean = scores["score"].sel(metric="r2", drop=True).mean("number")
    about = {"long_name": "R^2 of decoding the literals of a function, mean over literals"}
    return scores.assign(mean_r2=mean.assign_attrs(about))


def decode_terms(trained: Trained, n: int = 2000) -> xr.Dataset:
    """Linear decoding of terms and negations from the code, by ridge regression: our own.

    From the attention of the queried token to itself and, in the mean, to the other points.
    Decoders are fitted on `id`, where the terms of `ood` never occur: on `ood` only variables are
    decoded, except those that all its terms share. `kind_score`: means over terms and over
    variables.

    Args:
        trained: the trained model and its untrained control.
        n: sequences for fitting, and for scoring on each split.
    """
    decode = probes.decode_continuous
    scores = _decode(trained, n, decode, "target", "label", ("self", "others"))
    kinds = [label.split()[0] for label in scores["label"].to_numpy()]
    score = scores["score"].assign_coords(kind=("label", kinds))
    about = "R^2 of decoding, mean over terms or variables"
    return scores.assign(kind_score=score.groupby("kind").mean().assign_attrs(long_name=about))


def projection(trained: Trained, n: int = 1000) -> xr.Dataset:
    """The codes of held-out combinations in the plane, by t-SNE, of all layers together.

    In the first layer alone the code is the same for all functions where the attention of a token
    to itself does not depend on the others, as without a softmax.

    Args:
        trained: the trained model.
        n: number of sequences.
    """
    data = codes_of(trained.model, trained.task, fixed(trained, "test", n)).sel(key=["self"])
    labels = ["first_term", "function", "value"]
    code = data.set_coords(labels)["code"]
    points = probes.project(code, method="tsne", seed=trained.seed).reset_coords(labels)
    for name in labels:
        points[name].attrs["long_name"] = f"{name.replace('_', ' ')} of each code"
    return points


def samples(trained: Trained, n: int = 2) -> xr.Dataset:
    """Sequences of held-out combinations, with the value that the model answers.

    Args:
        trained: the trained model.
        n: number of sequences.
    """
    batch = trained.batch("test", n)
    with torch.no_grad():
        answer = trained.model(batch.inputs)[:, -1, 0]
    arrays = {
        "point": (("example", "pos", "variable"), batch.inputs[:, :, :-1], "points"),
        "value": (("example", "pos"), batch.latents["values"], "values of the function"),
        "literal": (("example", "term", "variable"), batch.latents["literals"], "1: not negated"),
        "answer": (("example",), answer, "the model's answer at the last point"),
    }
    data = xr.Dataset(
        {
            name: (dims, values.cpu().numpy(), {"long_name": about})
            for name, (dims, values, about) in arrays.items()
        }
    )
    return data.assign_coords({dim: range(size) for dim, size in data.sizes.items()})
