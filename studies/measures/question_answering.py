"""Measure of readers: which facts their connectors weigh most."""

from __future__ import annotations

from typing import Any, cast

import xarray as xr

import probes
from studies import engine
from tasks import Batch

NEEDED = {"first fact": 1, "second fact": 2}
"""The facts that a question for two facts needs, with their numbers in the latent `support`."""


def pointing(trained: engine.Trained, n: int = 400) -> xr.Dataset | None:
    """Which facts the connectors weigh most, for questions that need two facts.

    The weight of a fact is the sum of |M| over its words and those of the question: with softmax
    the weights of passage words for a question word, with CoDA its only matrix.

    Args:
        trained: the trained model and its untrained control.
        n: examples of each split; those that need two facts count.

    Returns:
        `share`, with bounds [weights, split, passage_layer, question_layer, control, target]: the
        share of questions whose largest weight is on a needed fact, see `probes.score_pointing`;
        `weights` is trained or untrained, `control` observed or shuffled. `chance` []: one fact of
        all. None if the data have no known facts, or no question of a split needs two.
    """
    parts, setup, chance = [], trained.setup, None
    for split in setup.splits:
        batch = trained.batch(split, n)
        if "fact" not in batch.latents:
            return None
        batch = batch[batch.latents["hops"] == 2]
        if len(batch) < 2:
            return None
        for name, model in {"trained": trained.model, "untrained": trained.untrained}.items():
            score = _score(model, batch, is_softmax=setup.composition is None)
            chance = score["chance"]
            parts.append(score.drop_vars("chance").expand_dims(weights=[name], split=[split]))
    found = xr.combine_by_coords(parts, combine_attrs="drop_conflicts")
    return cast(xr.Dataset, found).assign(chance=chance)


def _score(model: Any, batch: Batch[Any], *, is_softmax: bool) -> xr.Dataset:
    """The scores of all connectors [passage_layer, question_layer, ...]."""
    texts = ("question", "passage")
    hook, dims = ("pattern_b", texts) if is_softmax else ("pattern", texts[::-1])
    n_layers = len(model.connectors)
    quantities = {
        f"Q{layer}": probes.Quantity(
            f"connectors.*.{layer}.align.hook_{hook}", dims=("example", "head", *dims)
        )
        for layer in range(n_layers)
    }
    latents = {name: ("example", "passage") for name in ("fact", "support")}
    data = probes.capture(model, [batch], quantities, latent_dims=latents)
    layers = xr.Variable("question_layer", range(1, n_layers + 1))
    weight = abs(xr.concat([data[name] for name in quantities], layers)).sum(("question", "head"))
    number, support = data["fact"], data["support"]
    facts = range(int(number.max()) + 1)
    by_fact = xr.concat([weight.where(number == fact).sum("passage") for fact in facts], "facts")
    targets = {name: number.where(support == of).max("passage") for name, of in NEEDED.items()}
    score = probes.score_pointing(
        by_fact.argmax("facts"), targets, n_candidates=len(facts), resamples=200
    )
    score = score.rename(layer="passage_layer")
    return score.assign_coords(passage_layer=score["passage_layer"] + 1)
