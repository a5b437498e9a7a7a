"""What a study must not do with its examples: looked for while it trains and measures."""

import sys
from pathlib import Path

import torch

from studies.engine.cells import Cell, Trained, initial_model
from studies.engine.checkpoints import load_weights
from studies.engine.examples import TRAIN, Examples

SHORT = (
    "training.n_steps=2",
    "training.evaluate_every=1",
    "training.warmup_steps=1",
    "training.keep_at=",
    "training.compile=false",
)


class Recorder:
    """A sampler that notes which batches are drawn, and whether the engine draws them."""

    def __init__(self, sampler, calls):
        self._sampler, self._calls = sampler, calls

    def batch(self, split, index, size, device="cpu"):
        frames, frame = [], sys._getframe(1)
        while frame is not None and len(frames) < 6:
            frames.append((Path(frame.f_code.co_filename).name, frame.f_code.co_name))
            frame = frame.f_back
        by_engine = frames[0][0] == "examples.py"
        # What guessing gives may be counted on training examples; no model sees them.
        known = any(name == "references" for _, name in frames)
        if not known:
            self._calls.append((split, index, size, by_engine))
        return self._sampler.batch(split, index, size, device)

    def __getattr__(self, name):
        return getattr(self._sampler, name)


def breaches(study, preset, folder, monkeypatch):
    """What a study does wrong in its first cell, in words: nothing if all is well."""
    setups = study.plan(preset, [*SHORT, "seed=0,1"]).cells
    setup = setups[0]
    other = next(one for one in setups if one.seed == 1 and one.model == setup.model)
    calls = []
    sampler = type(setup).sampler
    monkeypatch.setattr(type(setup), "sampler", lambda self: Recorder(sampler(self), calls))
    found = [] if initial_weights_differ(setup, other) else ["both seeds have the same weights"]
    Cell(setup, root=folder).train()
    found += training_breaches(setup, calls)
    cell, drawn = Cell(setup, root=folder), {}
    fresh = {}
    for name, measure in study.plan(preset, SHORT).measures.items():
        calls.clear()
        trained = trained_of(cell, name)
        fresh[name] = trained
        measure(trained)
        drawn[name] = list(calls)
        if any(split == TRAIN for split, *_ in calls):
            found.append(f"measure {name} draws from train")
        if not all(by_engine for *_, by_engine in calls):
            found.append(f"measure {name} draws batches by itself")
    found += stream_breaches(setup, drawn)
    first = next(iter(fresh.values()))
    pairs = zip(first.model.parameters(), first.untrained.parameters(), strict=True)
    if all(torch.equal(a, b) for a, b in pairs):
        found.append("the untrained model has the trained model's weights")
    return found


def initial_weights_differ(first, second):
    pairs = zip(
        initial_model(first, "cpu").parameters(),
        initial_model(second, "cpu").parameters(),
        strict=True,
    )
    return any(not torch.equal(a, b) for a, b in pairs)


def training_breaches(setup, calls):
    """Of training: it draws one batch of `train` a step, and the validation examples."""
    found = []
    steps = [index for split, index, _, _ in calls if split == TRAIN]
    if sorted(set(steps)) != [0, 1] or len(steps) != 2:
        found.append(f"training draws batches {steps} of train, not 0 and 1")
    if not all(by_engine for *_, by_engine in calls):
        found.append("training draws batches by itself")
    for split in {split for split, *_ in calls} - {TRAIN}:
        if split not in setup.splits:
            found.append(f"training draws from {split}, which is not scored")
        ends = [(index + 1) * size for one, index, size, _ in calls if one == split]
        room = -(-setup.n_validation // setup.at_once) * setup.at_once
        if setup.size(split) is None and {i for s, i, *_ in calls if s == split} != {0}:
            found.append(f"training draws more than the validation examples of {split}")
        if setup.size(split) is not None and max(ends) > room:
            found.append(f"training draws more than the validation examples of {split}")
    return found


def stream_breaches(setup, drawn):
    """Of streams: no batch is drawn for two measures, or for one that chooses."""
    seen = {}
    found = []
    for name, calls in drawn.items():
        for split, index, _, _ in calls:
            if setup.size(split) is not None:
                continue
            if index == 0:
                found.append(f"measure {name} sees the validation examples of {split}")
            if seen.setdefault((split, index), name) != name:
                found.append(f"measures {name} and {seen[split, index]} share examples of {split}")
    return found


def trained_of(cell, name):
    model = initial_model(cell.setup, "cpu")
    load_weights(model, cell.folder / "best.safetensors")
    fresh = Examples(cell.setup, "cpu").fresh(name)
    return Trained(cell.setup, model.eval(), 2, "cpu", fresh)
