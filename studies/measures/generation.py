"""Measures of texts that a model writes: BLEU and exact match, and what its attention aligns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

import probes
from studies.engine import Trained
from studies.measures.bleu import Tokenize, score_bleu
from tasks import Batch

SEARCHES = ("greedy", "beam")
SAMPLES = ("example", "query_pos")
PROGRAMS = {
    "solved": "share of programs that pass all tests",
    "exact": "share of programs that are right in every token",
}


def written(
    trained: Trained, batch: Batch[Any], *, width: int, length_penalty: float, averaged: int
) -> Iterator[tuple[str, Int[Tensor, "example pos"]]]:
    """Yield the name of each of `SEARCHES`, and the target ids that the model writes by it.

    Args:
        trained: the trained model.
        batch: the examples; nothing is longer than the longest target of their split.
        width: width of the beam.
        length_penalty: exponent of its length penalty.
        averaged: number of the last kept checkpoints whose mean writes; 0: the tested one.
    """
    model = trained.averaged(averaged) if averaged else trained.model
    parts = list(batch.parts(trained.setup.evaluation_batch_size))
    for search, n_beams in zip(SEARCHES, (1, width), strict=True):
        ids = [
            model.search(
                part.inputs[0],
                part.targets.shape[1],
                width=n_beams,
                length_penalty=length_penalty,
            )[0][:, 0]
            for part in parts
        ]
        yield search, torch.cat(ids)


def decoding(
    trained: Trained,
    n: int = 300,
    width: int = 4,
    length_penalty: float = 0.6,
    averaged: int = 0,
    tokenize: Tokenize = "none",
) -> xr.Dataset:
    """BLEU and exact match of what the model writes, greedily and by beam search.

    Args:
        trained: the trained model.
        n: examples of each split.
        width: width of the beam.
        length_penalty: exponent of its length penalty.
        averaged: number of the last kept checkpoints whose mean writes; 0: the tested one.
        tokenize: how texts become words for BLEU, see `score_bleu`.

    Returns:
        `bleu` (0 to 100) and `exact` [split, search], with 95% intervals over examples.
    """
    setup, task = trained.setup, trained.task
    results = []
    for split in setup.splits:
        batch = trained.batch(split, n)
        references = [task.decode(row) for row in batch.targets]
        searches = []
        for search, ids in written(
            trained, batch, width=width, length_penalty=length_penalty, averaged=averaged
        ):
            bleu = score_bleu(
                [task.decode(row) for row in ids], references, tokenize=tokenize, seed=trained.seed
            )
            right = task.score(ids, batch)["correct"].double().cpu().numpy()
            exact = probes.bootstrap_ratio(right, seed=trained.seed)
            data = probes.interval_variables("bleu", bleu, (), long_name="BLEU, 0 to 100")
            long_name = "share of texts that are right in every token"
            data |= probes.interval_variables("exact", exact, (), long_name=long_name, units="1")
            searches.append(xr.Dataset(data, {"search": search}))
        results.append(xr.concat(searches, "search"))
    return cast(xr.Dataset, xr.concat(results, xr.Variable("split", list(setup.splits))))


def execution(
    trained: Trained,
    n: int = 200,
    width: int = 4,
    length_penalty: float = 0.6,
    averaged: int = 0,
) -> xr.Dataset:
    """How many programs pass all tests of their problem, and how many are the right ones.

    Args:
        trained: the trained model, of a `ProgramSetup`.
        n: examples of each split.
        width: width of the beam.
        length_penalty: exponent of its length penalty.
        averaged: number of the last kept checkpoints whose mean writes; 0: the tested one.

    Returns:
        `solved` and `exact` [split, search], with 95% intervals over examples.
    """
    setup, task, results = trained.setup, trained.task, []
    for split in setup.splits:
        batch = trained.batch(split, n)
        problems, searches = setup.problems(batch, split), []
        for search, ids in written(
            trained, batch, width=width, length_penalty=length_penalty, averaged=averaged
        ):
            texts = [task.decode(row) for row in ids]
            pairs = zip(problems, texts, strict=True)
            shares = {
                "solved": [problem.is_solved_by(text) for problem, text in pairs],
                "exact": task.score(ids, batch)["correct"].tolist(),
            }
            data: dict[str, Any] = {}
            for name, values in shares.items():
                interval = probes.bootstrap_ratio(np.array(values, float), seed=trained.seed)
                long_name = PROGRAMS[name]
                data |= probes.interval_variables(
                    name, interval, (), long_name=long_name, units="1"
                )
            searches.append(xr.Dataset(data, {"search": search}))
        results.append(xr.concat(searches, "search"))
    return cast(xr.Dataset, xr.concat(results, xr.Variable("split", list(setup.splits))))


def alignment(trained: Trained, n: int = 300) -> xr.Dataset | None:
    """How often cross-attention points to the source token that a target token comes from.

    The largest weight by size is compared with the latent `alignment` where a token is predicted,
    beside the source token at the same position, among the tokens whose two targets differ.

    Args:
        trained: the trained model and its untrained control.
        n: examples of each split.

    Returns:
        As `probes.score_pointing` [split, control, target, layer, head], with `control` observed,
        shuffled or untrained; None if the task does not know what comes from what.
    """
    setup, results = trained.setup, []
    for split in setup.splits:
        batch = trained.batch(split, n)
        if "alignment" not in batch.latents:
            return None
        observed = _pointing(trained, trained.model, batch)
        untrained = _pointing(trained, trained.untrained, batch).sel(control=["observed"])
        both = [observed, untrained.assign_coords(control=["untrained"])]
        results.append(xr.concat(both, "control", data_vars="minimal", **_JOIN))
    return xr.concat(results, xr.Variable("split", list(setup.splits)), data_vars="all", **_JOIN)


_JOIN: Any = {"coords": "minimal", "compat": "override", "combine_attrs": "drop_conflicts"}


def _pointing(trained: Trained, model: Any, batch: Batch[Any]) -> xr.Dataset:
    """Where the cross-attention of a model points to."""
    setup = trained.setup
    place = {"cross": setup.places(batch)["cross"]}
    parts: Iterable[Batch[Any]] = batch.parts(setup.evaluation_batch_size)
    data = probes.capture_places(model, parts, place, ["pattern"])["cross"]
    weights = abs(data["pattern"]).where(data["valid"], -1)
    n_tokens = (batch.inputs[0] != setup.padding).sum(1, keepdim=True).cpu()
    aligned = batch.latents["alignment"].cpu()
    same = torch.arange(aligned.shape[1]).minimum(n_tokens - 1)
    # Where nothing is known both are -1, and samples whose targets are equal do not count.
    targets = {
        "aligned": xr.DataArray(aligned.numpy(), dims=SAMPLES),
        "same position": xr.DataArray(torch.where(aligned < 0, -1, same).numpy(), dims=SAMPLES),
    }
    scores = probes.score_pointing(
        weights.argmax("key_pos"),
        targets,
        n_candidates=int(n_tokens.max()),
        samples=SAMPLES,
        resamples=200,
        seed=trained.seed,
    )
    counted = ((aligned != same) & (aligned >= 0)).double()
    chance = (counted / n_tokens).sum() / counted.sum()
    about = {"long_name": "share if each token of the source is as likely"}
    return scores.assign(chance=((), chance.item(), about))
