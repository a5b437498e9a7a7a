"""Training of the models of setups: their examples, evaluation, folders and shared states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from studies.engine import folders
from studies.engine.checkpoints import Trunk
from studies.engine.examples import TRAIN, Examples
from studies.engine.fingerprints import code_of
from studies.engine.folders import RunError
from studies.engine.scoring import log_entries, score
from studies.engine.settings import plain
from studies.engine.setup import Setup
from studies.engine.training import NEVER, Deadline, Trainee, train


def run_training(
    setups: Sequence[Setup],
    cell_folders: Sequence[Path],
    device: str,
    *,
    position: int = 0,
    deadline: Deadline = NEVER,
) -> None:
    """Train models on `train`, several together, with checkpoints chosen by `setup.selection`.

    Args:
        setups: the settings of models that differ in their seeds alone.
        cell_folders: the folder of each model, `ROOT/models/NAME`.
        device: where models run.
        position: line of the progress bar.
        deadline: stop at the last checkpoint before it.

    Raises:
        RunError: a setup refuses to build its model with these settings, or models that are trained
            together have different losses; or see `studies.engine.training.train`.
        TrainingError: see `studies.engine.training.train`.
    """
    first, names = setups[0], ", ".join(str(setup.seed) for setup in setups)
    trainees = list(map(partial(_trainee, device=device), setups, cell_folders))
    _check_losses(setups, trainees[0].model, device)
    train(
        trainees,
        config=first.training,
        objective=first.loss,
        select=first.selection.key,
        sign=first.sign,
        description=f"{first.model}, seed {names}",
        position=position,
        deadline=deadline,
    )


def _trainee(setup: Setup, folder: Path, *, device: str) -> Trainee:
    """A setup's model with its examples, to be trained."""
    try:
        model = setup.build(torch.Generator().manual_seed(setup.seed)).to(device)
    except ValueError as error:
        raise RunError(f"the model cannot be built: {error}") from error
    examples = Examples(setup, device)
    validation = {split: examples.validation(split) for split in setup.splits}

    def evaluate(model: nn.Module) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for split, batches in validation.items():
            metrics |= log_entries(setup, score(setup, model, batches, split), split)
        return metrics

    return Trainee(
        model=model,
        sample=examples.train,
        evaluate=evaluate,
        folder=folder,
        identity=folders.config_hash(setup),
        seed=setup.seed,
        trunk=trunk_of(setup, folder.parents[1]),
    )


def _check_losses(setups: Sequence[Setup], model: nn.Module, device: str) -> None:
    """Check that a model has the same loss by all setups, since all are trained on the first's.

    Raises:
        RunError: the losses differ.
    """
    if not setups[1:]:
        return
    losses, batch = [], setups[0].sampler().batch(TRAIN, 0, 2, device)
    with torch.no_grad(), torch.random.fork_rng():
        for setup in setups:
            torch.manual_seed(0)
            losses.append(float(setup.loss(model.eval(), batch, 0)))
    if len(set(losses)) > 1:
        shown = ", ".join(f"{loss:.4g}" for loss in losses)
        raise RunError(
            "models that are trained together must have one loss, got losses that depend on the "
            f"seed: {shown} of the same model and examples; train them with --together 1"
        )


def trunk_of(setup: Setup, root: Path) -> Trunk | None:
    """The states that models with other numbers of steps share; None if they share none.

    Args:
        setup: the settings of a model.
        root: folder that holds `models/` and `trunks/`.
    """
    training = setup.training
    # Weights that are kept along the way belong to one run.
    if training.schedule != "stable" or training.keep_at or setup.depends_on_length:
        return None
    config = plain(setup)
    for name in ("n_steps", "decay_steps"):
        del config["training"][name]
    identity = folders.config_hash({"config": config, "code": code_of(setup, run_training)})
    return Trunk(root / "trunks" / identity, identity)
