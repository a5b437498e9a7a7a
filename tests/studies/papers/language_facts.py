"""Facts about language models, see `facts`."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from studies.setups.text import LanguageSetup
from tests.studies.papers.transformer_facts import normalised, transformer_facts

TOKENS = 150_000_000
"""Tokens of WikiText-103 with the vocabulary of the published code, as the study assumes."""


def language_facts(setup: LanguageSetup) -> dict[str, Any]:
    """Facts about the text and the model of a language setup, without reading the text."""
    task, training = setup.task, setup.training
    n_tokens = training.n_steps * training.batch_size * task.length
    with patch.object(LanguageSetup, "sampler", vocabulary_only):
        same = normalised(setup)
        facts = transformer_facts(same)
        with torch.device("meta"):
            bias = same.build(torch.Generator()).blocks[0].relative_bias
    if bias is not None:
        facts |= {"model.n_buckets": bias.table.shape[1], "model.max_distance": bias.max_distance}
    rotary = setup.attention.measures_distances
    return facts | {
        "model.positions": "rotary" if rotary else facts["model.positions"],
        "task.name": task.path or task.name,
        "task.examples": "windows",
        "task.vocabulary_size": task.vocabulary_size,
        "task.length": task.length,
        "task.epochs": round(n_tokens / TOKENS, 2),
    }


def vocabulary_only(setup: LanguageSetup) -> Any:
    """In place of the text, which is not there: its number of different tokens."""
    return SimpleNamespace(vocabulary_size=setup.task.vocabulary_size)
