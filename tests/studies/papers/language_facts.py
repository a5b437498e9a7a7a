"""Facts about language models, see `facts`."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch

from probes import count_parameters
from studies.setups.text import LanguageSetup
from tests.studies.papers.transformer_facts import transformer_facts

TOKENS = 150_000_000
"""Tokens of WikiText-103 with the paper's vocabulary, as the study assumes."""


def language_facts(setup):
    task, training = setup.task, setup.training
    return _model_facts(replace(setup, training=replace(training, learning_rate=0.0), seed=0)) | {
        "task.name": task.path or task.name,
        "task.examples": "windows",
        "task.vocabulary_size": task.vocabulary_size,
        "task.length": task.length,
        "task.epochs": round(training.n_steps * training.batch_size * task.length / TOKENS, 2),
        "model.dropout.embedding": 0.0,
    }


@functools.cache
def _model_facts(setup):
    # The text is not there; only the number of its tokens matters here.
    def sampler(setup):
        return SimpleNamespace(vocabulary_size=setup.task.vocabulary_size)

    with patch.object(LanguageSetup, "sampler", sampler), torch.device("meta"):
        model = setup.build(torch.Generator(device="cpu"))
    return transformer_facts(model) | {"model.n_parameters": count_parameters(model)}
