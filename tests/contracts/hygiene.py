"""Detection of breaches of data hygiene: which examples a study draws in training and measures."""

import sys
from pathlib import Path

import torch

from studies.engine.cells import Cell
from studies.engine.checkpoints import load_weights
from studies.engine.examples import TRAIN, Examples
from studies.engine.trained import Trained, initial_model

SHORT = (
    "training.n_steps=2",
    "training.evaluate_every=1",
    "training.warmup_steps=1",
    "training.keep_at=",
    "training.compile=false",
)


class Recorder:
    """A sampler that records which batches are drawn, and whether the engine draws them."""

    def __init__(self, sampler, calls):
        self._sampler, self._calls = sampler, calls

    def batch(self, split, index, size, device="cpu"):
        frames, frame = [], sys._getframe(1)
        while frame is not None and len(frames) < 6:
            frames.append((Path(frame.f_code.co_filename).name, frame.f_code.co_name))
            frame = frame.f_back
        by_engine = frames[0][0] == "examples.py"
        # References such as chance may be computed on training examples; no model sees them.
        for_references = any(name == "references" for _, name in frames)
        if not for_references:
            self._calls.append((split, index, size, by_engine))
        return self._sampler.batch(split, index, size, device)

    def __getattr__(self, name):
        return getattr(self._sampler, name)


def breaches(study, preset, folder, monkeypatch):
    """Messages about all breaches in the first cell of a study; empty if there are none."""
    setups = study.plan(preset, [*SHORT, "seed=0,1"]).cells
    setup = setups[0]
    other = next(other for other in setups if other.seed == 1 and other.model == setup.model)
    calls = []
    sampler = type(setup).sampler
    monkeypatch.setattr(type(setup), "sampler", lambda self: Recorder(sampler(self), calls))
    messages = []
    if have_equal_weights(initial_model(setup, "cpu"), initial_model(other, "cpu")):
        messages.append("both seeds have the same weights")
    cell = Cell(setup, root=folder)
    cell.train()
    messages += training_breaches(setup, calls)
    calls_of_measures = {}
    for name, measure in study.plan(preset, SHORT).measures.items():
        calls.clear()
        trained = trained_for(name, cell)
        measure(trained)
        calls_of_measures[name] = list(calls)
        if any(split == TRAIN for split, *_ in calls):
            messages.append(f"measure {name} draws from train")
        if not all(by_engine for *_, by_engine in calls):
            messages.append(f"measure {name} draws batches by itself")
        if name == "scores" and have_equal_weights(trained.model, trained.untrained):
            messages.append("the untrained model has the trained model's weights")
    return messages + stream_breaches(setup, calls_of_measures)


def have_equal_weights(first, second):
    return all(map(torch.equal, first.parameters(), second.parameters()))


def training_breaches(setup, calls):
    """Breaches in training, which draws one batch of `train` a step, and validation examples."""
    messages = []
    steps = [index for split, index, *_ in calls if split == TRAIN]
    if sorted(steps) != [0, 1]:
        messages.append(f"training draws batches {steps} of train, not 0 and 1")
    if not all(by_engine for *_, by_engine in calls):
        messages.append("training draws batches by itself")
    n_batches = -(-setup.n_validation // setup.evaluation_batch_size)
    for split in {split for split, *_ in calls} - {TRAIN}:
        if split not in setup.splits:
            messages.append(f"training draws from {split}, which is not scored")
        draws = [(index, size) for drawn, index, size, _ in calls if drawn == split]
        if setup.size(split) is None:
            too_many = any(index != 0 for index, _ in draws)
        else:
            last = max((index + 1) * size for index, size in draws)
            too_many = last > n_batches * setup.evaluation_batch_size
        if too_many:
            messages.append(f"training draws more than the validation examples of {split}")
    return messages


def stream_breaches(setup, calls_of_measures):
    """Breaches in endless splits, whose batches belong to validation or to a single measure."""
    owners = {}
    messages = []
    for name, calls in calls_of_measures.items():
        for split, index, *_ in calls:
            if setup.size(split) is not None:
                continue
            if index == 0:
                messages.append(f"measure {name} sees the validation examples of {split}")
            owner = owners.setdefault((split, index), name)
            if owner != name:
                messages.append(f"measures {name} and {owner} share examples of {split}")
    return messages


def trained_for(measure, cell):
    """The argument of a measure, for the trained model of a cell."""
    model = initial_model(cell.setup, "cpu")
    load_weights(model, cell.folder / "best.safetensors")
    fresh = Examples(cell.setup, "cpu").fresh(measure)
    return Trained(cell.setup, model.eval(), 2, "cpu", fresh)
