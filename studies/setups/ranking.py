"""Setup: questions and answers, ranked by decomposable attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import xarray as xr

import tasks
from studies import engine
from studies.setups.pair_reader import PairReaderSetup

METRICS = {
    "average_precision": "mean average precision (MAP)",
    "reciprocal_rank": "mean reciprocal rank (MRR)",
    "recall_at_1": "share of right answers that rank first (R@1)",
    "recall_at_2": "share of right answers among the first two (R@2)",
    "recall_at_5": "share of right answers among the first five (R@5)",
}
"""The means over questions of what `tasks.score_ranking` returns."""


@dataclass(frozen=True, kw_only=True)
class RankingSetup(PairReaderSetup):
    """Generated questions, whose right answer affirms all that is asked for.

    Args:
        task: the questions.
    """

    task: tasks.PlantedRankingConfig

    task_type: ClassVar = tasks.PlantedRanking


def ranking(trained: engine.Trained, n: int = 4000) -> xr.Dataset | None:
    """How high right answers rank, by the difference of both logits (Tay et al. 2019, Table 2).

    Args:
        trained: the trained model and its untrained control.
        n: largest number of answers of each split.

    Returns:
        A variable [split, control] for each of `METRICS`, with `control` trained or untrained; None
        if answers are not ranked, that is without the latent `question`.
    """
    setup, values = trained.setup, []
    models = {"trained": trained.model, "untrained": trained.untrained}
    for split in setup.splits:
        batch = trained.batch(split, n)
        if "question" not in batch.latents:
            return None
        relevant, question = batch.targets[:, 0], batch.latents["question"]
        for model in models.values():
            with torch.inference_mode():
                parts = batch.parts(setup.evaluation_batch_size)
                logits = torch.cat([setup.answer(model, part)[:, 0] for part in parts])
            scores = tasks.score_ranking(logits[:, 1] - logits[:, 0], relevant, question)
            values.append([scores[name].mean().item() for name in METRICS])
    coords = {"split": list(setup.splits), "control": list(models)}
    columns = np.reshape(values, (len(setup.splits), len(models), len(METRICS)))
    return xr.Dataset(
        {
            name: (tuple(coords), columns[..., number], {"long_name": long_name, "units": "1"})
            for number, (name, long_name) in enumerate(METRICS.items())
        },
        coords,
    )
