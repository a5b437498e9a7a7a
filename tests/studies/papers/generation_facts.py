"""Facts about the setups of written texts, see `facts`."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from studies.setups.encoder_decoder import EncoderDecoderSetup
from studies.setups.text_generation import GenerationSetup, StoredSequencesSetup
from tasks import SequencesConfig
from tests.studies.papers.coda_facts import encoder_decoder_facts
from tests.studies.papers.transformer_facts import normalised
from tests.tasks.algolisp.test_problems import write_problems
from tests.tasks.stored.test_sequences import write_parallel


@functools.cache
def folder_of_data() -> tempfile.TemporaryDirectory[str]:
    """A folder with tiny files of both formats, in folders of their own."""
    folder = tempfile.TemporaryDirectory()
    for name, write in (("en", write_parallel), ("text", write_problems)):
        path = Path(folder.name, name)
        path.mkdir()
        write(path)
    return folder


def generation_facts(setup: GenerationSetup) -> dict[str, Any]:
    """Facts about texts and the encoder-decoder that writes them, without the data themselves."""
    same: Any = replace(normalised(setup), training=setup.training)
    facts: dict[str, Any] = {"training.tokens_per_batch": f"{setup.training.batch_size} texts"}
    if isinstance(setup, StoredSequencesSetup):
        path = str(Path(folder_of_data().name, setup.task.source))
        same = replace(same, task=replace(setup.task, path=path, vocabulary_size=300))
        facts |= text_facts(setup.task, same)
    # One layer has the parts of all.
    facts |= encoder_decoder_facts(replace(same, n_layers=1))
    return facts | {"model.n_layers": n_layers_of(same)}


def text_facts(config: SequencesConfig, tiny: StoredSequencesSetup) -> dict[str, Any]:
    """Facts about the texts of files; what counts as right is that of the setup of tiny files."""
    batch = tiny.sampler().batch("train", 0, 2)
    one_off = batch.targets.clone()
    one_off[:, 0] += 1
    wrong, _ = tiny.scores(one_off, batch, "valid")["accuracy"]
    return {
        "task.source": config.source,
        "task.target": config.target,
        "task.vocabulary_size": config.vocabulary_size,
        "task.vocabulary": "byte pairs",
        "task.correct_if": "other" if wrong.any() else "the whole sequence is right",
    }


def n_layers_of(setup: EncoderDecoderSetup) -> int:
    """The number of layers of encoder and decoder each."""
    with torch.device("meta"):
        model: Any = setup.build(torch.Generator())
    assert len(model.encoder_blocks) == len(model.decoder_blocks)
    return len(model.encoder_blocks)
