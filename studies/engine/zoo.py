"""Models of the zoo: added from finished runs, and scored again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xarray as xr
from torch import nn

import mechanisms
from mechanisms import model_zoo
from studies.engine import folders, settings
from studies.engine.cells import identity_of_weights
from studies.engine.checkpoints import load_weights, read_log
from studies.engine.examples import Examples
from studies.engine.folders import RunError
from studies.engine.results import read_result
from studies.engine.scoring import log_entries, score, tested_entry, training_dataset
from studies.engine.setup import ALL, Setup
from studies.engine.study import Study
from studies.engine.trained import initial_model

SHARE_TOLERANCE, TOLERANCE = 0.005, 0.01
"""How much scores may differ between processors: shares of right answers absolutely, because a few
answers are on the edge, and other metrics relative to their value."""


@dataclass(frozen=True)
class Candidate:
    """A trained cell that may be added.

    Attributes:
        folder: its folder.
        setup: its settings.
        codes: the records of the code that trained it.
    """

    folder: Path
    setup: Setup
    codes: list[dict[str, Any]]

    @property
    def identity(self) -> str:
        """The hash of the settings on which the weights depend."""
        return identity_of_weights(self.setup)


def add(run: Path, study: Study, name: str | None = None, only: Sequence[str] = ()) -> list[str]:
    """Add the models of a finished run to the zoo, and return their names.

    Cells whose tuned settings are not the best of their condition, and models that the run took
    from the zoo, are left out.

    Args:
        run: the folder `STUDY-HASH`, beside the folder `models`.
        study: the study that made it.
        name: the names of the models, with settings in braces, such as
            `"raven-{model}-k{task.n_features}-seed{seed}"`; None: `"STUDY-{model}-seed{seed}"`.
        only: settings of the cells to add, such as `["model=hyla", "seed=0,1"]`.

    Raises:
        ValueError: a setting is unknown, or no cell that was trained has these settings; or a name
            is taken.
        RunError: the run is not finished; its models are not in their folders, or were trained
            again since; the study has other settings now; or a model is not a class of
            `mechanisms` that is built from its config alone.
    """
    result = _result_of(run)
    cells = [cell for cell in _candidates(run, result, study) if _has(cell.setup, only)]
    if not cells:
        wanted = f" with the settings {', '.join(only)}" if only else ""
        raise ValueError(f"{run} has trained no model{wanted}")
    template = name or f"{study.name}-{{model}}-seed{{seed}}"
    names = [_name_of(cell.setup, template) for cell in cells]
    known = names_by_identity(study)
    for new, cell in zip(names, cells, strict=True):
        old = known.get(cell.identity, new)
        if old != new:
            raise ValueError(f"{cell.folder.name} is in the zoo already, as {old}, not {new}")
        if names.count(new) > 1 or new in {*known.values()} - {known.get(cell.identity)}:
            raise ValueError(f"names must be different, got {new} for {cell.folder.name} too")
    # All are checked before the first is written.
    models = [_model_of(cell, result) for cell in cells]
    for new, cell, model in zip(names, cells, models, strict=True):
        _write(new, cell, model, result)
    return names


def verify(name: str, study: Study) -> None:
    """Score a model of the zoo on the validation examples again, and compare with its record.

    Raises:
        ValueError: there is no such model.
        RunError: the scores are others, or the study has other settings now.
    """
    record = model_zoo.record_of(name)
    setup = setup_of(record["config"], study)
    stored = record["validation"]
    scores = validate(mechanisms.load(model_zoo.PREFIX + name), setup)
    tolerances = {
        f"{split}/{metric}": {"abs_tol": SHARE_TOLERANCE} if of.percent else {"rel_tol": TOLERANCE}
        for split in setup.splits
        for metric, of in setup.metrics.items()
    }
    different = [
        f"{key} is {scores.get(key)}, not {stored.get(key)}"
        for key, tolerance in tolerances.items()
        if (key in scores or key in stored)
        and not math.isclose(scores.get(key, math.nan), stored.get(key, math.nan), **tolerance)
    ]
    if different:
        raise RunError(f"{name} does not have the scores of its record: {'; '.join(different)}")


def validate(model: nn.Module, setup: Setup) -> dict[str, float]:
    """The metrics of a model on all validation examples of each split, by `split/metric`."""
    examples = Examples(setup, "cpu")
    scores: dict[str, float] = {}
    for split in setup.splits:
        scored = score(setup, model, examples.validation(split), split)
        scores |= log_entries(setup, scored, split)
    return {key: value for key, value in scores.items() if _is_of_split(key, value)}


def setup_of(config: Mapping[str, Any], study: Study) -> Setup:
    """The setup of a study that has the settings `config`, as `settings.plain` gives them.

    Raises:
        RunError: the study has no such setup, because it has other settings now.
    """
    presets = [preset.setup for preset in study.presets.values()]
    for like in (study.setup, *(setup for setup in presets if setup is not None)):
        try:
            setup = settings.from_plain(config, like)
        except ValueError:
            continue
        if _agrees(settings.plain(setup), config):
            return setup
    raise RunError(f"{study.name} has no setup with the settings {config}; it has changed since")


def names_by_identity(study: Study) -> dict[str, str]:
    """The names of a study's models in the zoo, by `identity_of_weights`.

    Models whose settings the study no longer has are left out.
    """
    names: dict[str, str] = {}
    for name, record in model_zoo.records().items():
        if record["study"] == study.name:
            with suppress(RunError):
                names[identity_of_weights(setup_of(record["config"], study))] = name
    return names


def _agrees(values: Any, stored: Any) -> bool:
    """Whether plain settings have all the stored values; they may have further settings."""
    if isinstance(stored, Mapping) and isinstance(values, Mapping):
        return all(name in values and _agrees(values[name], stored[name]) for name in stored)
    return values == (list(stored) if isinstance(stored, tuple) else stored)


def study_of(run: Path) -> str:
    """The name of the study that made a finished run.

    Raises:
        RunError: the run is not finished.
    """
    return str(_result_of(run).attrs["study"])


def _result_of(run: Path) -> xr.DataTree:
    if not (run / "result.nc").exists():
        raise RunError(f"{run} is no finished run: it has no result.nc")
    return read_result(run / "result.nc")


def _candidates(run: Path, result: xr.DataTree, study: Study) -> Iterator[Candidate]:
    """The cells that a run has trained, with the best tuned settings of their conditions."""
    chosen = result["scores"]["chosen"].to_numpy() == 1
    taken = json.loads(result.attrs.get("from_zoo", "{}"))
    for cell in result["scores"]["cell"].to_numpy()[chosen].tolist():
        if cell in taken:
            continue
        folder = run.parent / "models" / cell
        content = folders.read_json(folder / "config.json")
        if not content:
            raise RunError(f"{folder} has no model: it was moved")
        yield Candidate(folder, setup_of(content["config"], study), content["codes"])


def _has(setup: Setup, only: Sequence[str]) -> bool:
    """Whether a setup has the settings `only`."""
    allowed = settings.read(only, setup).items()
    return all(settings.get(setup, path) in values for path, values in allowed)


def _name_of(setup: Setup, template: str) -> str:
    """The name of a model: a template with settings in braces."""
    try:
        name = template.format_map(vars(setup))
    except (KeyError, AttributeError, IndexError, ValueError) as error:
        paths = ", ".join(path for path, *_ in settings.describe(setup))
        message = f"name must be text with settings in braces, of {paths}; got {template!r}"
        raise ValueError(message) from error
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"name must have only letters, digits and ._- in it, got {name!r}")
    return name


def _model_of(cell: Candidate, result: xr.DataTree) -> Any:
    """The tested model of a cell."""
    setup = cell.setup
    training = result["training"].to_dataset().sel(cell=cell.folder.name)
    in_folder = training_dataset(setup, read_log(cell.folder))
    if any(float(in_folder[key]) != float(training[key]) for key in ("tested_step", "validation")):
        raise RunError(f"{cell.folder} was trained again since the result was made")
    model: Any = initial_model(setup, "cpu").eval()
    load_weights(model, cell.folder / f"{setup.training.checkpoint}.safetensors")
    model_class = type(model)
    if getattr(mechanisms, model_class.__name__, None) is not model_class:
        raise RunError(
            f"{cell.folder.name} cannot go into the zoo: its model is of the class "
            f"{model_class.__module__}.{model_class.__qualname__}, which mechanisms does not export"
        )
    return model


def _write(name: str, cell: Candidate, model: Any, result: xr.DataTree) -> None:
    """Write the weights and the record of a model into the zoo."""
    setup, log = cell.setup, read_log(cell.folder)
    path = model_zoo.FOLDER / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        mechanisms.save(model, path)
    except TypeError as error:
        raise RunError(f"{cell.folder.name} cannot go into the zoo: {error}") from error
    scores = result["scores"].to_dataset().sel(cell=cell.folder.name, group=ALL)
    by_key = {
        f"{split}/{metric}": float(scores[metric].sel(split=split))
        for split in setup.splits
        for metric in setup.metrics
    }
    record = {
        "study": result.attrs["study"],
        "mechanism": type(model).__name__,
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "step": int(log[tested_entry(setup, log)]["step"]),
        "score": {key: value for key, value in by_key.items() if _is_of_split(key, value)},
        # Of the file, since that is what users load.
        "validation": validate(mechanisms.load(path), setup),
        "config": settings.plain(setup),
        "codes": cell.codes,
        "log": log,
    }
    folders.write_json(path.with_suffix(".json"), record)


def _is_of_split(key: str, value: float) -> bool:
    """Whether a score is of a whole split, not of a group of its examples, and a number."""
    return key.count("/") == 1 and math.isfinite(value)
