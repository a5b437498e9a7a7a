"""The zoo of trained models: lists it, or adds the models of finished runs.

    python studies/zoo.py
    python studies/zoo.py runs/raven_latent_code-HASH
    python studies/zoo.py runs/raven_latent_code-HASH --name "raven-{model}-k{task.n_features}"
    python studies/zoo.py runs/raven_latent_code-HASH --only model=hyla --only seed=0,1

The first lists the models with their scores; `mechanisms.load("zoo:NAME")` loads one of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.table import Table

import mechanisms
import studies
from mechanisms import model_zoo
from studies.engine import RunError, Setup, Study, zoo
from studies.engine.command import console, exit_on
from studies.report.names import name_of

Runs = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[RUN_FOLDER]...", help="finished runs, such as runs/STUDY-HASH"),
]
Name = Annotated[
    str | None,
    typer.Option(help="names of the models, with settings in braces: raven-{model}-seed{seed}"),
]
Only = Annotated[
    list[str] | None,
    typer.Option(help="add only models with a setting, such as seed=0,1; repeatable"),
]


def setup_of(name: str) -> Setup:
    """The settings with which a model of the zoo was trained; its `sampler()` is the task.

    Raises:
        ValueError: there is no such model.
        RunError: its study has other settings now.

    Example:
        >>> setup_of("raven-hyla-k2-seed0").sampler().batch("ood", 0, 256)
    """
    record = model_zoo.record_of(name)
    return zoo.setup_of(record["config"], all_studies()[record["study"]])


def all_studies() -> dict[str, Study]:
    """The studies of this package, by name."""
    modules = [
        importlib.import_module(f"studies.{module.name}")
        for module in pkgutil.iter_modules(studies.__path__)
        if not module.ispkg
    ]
    values = [value for module in modules for value in vars(module).values()]
    return {value.name: value for value in values if isinstance(value, Study)}


def run_zoo(runs: Runs = None, name: Name = None, only: Only = None) -> None:
    """List the models of the zoo, or add the models of finished runs to it."""
    write = console().print
    with exit_on(ValueError, RunError):
        for run in runs or []:
            made_by, of_package = zoo.study_of(run), all_studies()
            if made_by not in of_package:
                raise ValueError(f"{run} must be a run of a study of the package, got {made_by!r}")
            added = zoo.add(run, of_package[made_by], name, only or [])
            write(f"added {', '.join(added)}")
    if not runs:
        table = listing()
        console(table).print(table)


def listing() -> Table:
    """A table of the models with the scores of their splits, on unseen examples."""
    found = mechanisms.zoo()
    table = Table("model", "parameters", "metric", title="trained models", box=SIMPLE)
    for split in found["split"].to_numpy():
        table.add_column(name_of(split), justify="right")
    for model in found["model"].to_numpy():
        of_model = found.sel(model=model)
        parameters = f"{int(of_model['parameters']):,}"
        scores = of_model["score"].dropna("metric", how="all")
        for metric in scores["metric"].to_numpy():
            values = scores.sel(metric=metric).to_numpy()
            cells = ["" if value != value else f"{value:.3g}" for value in values]
            table.add_row(str(model), parameters, name_of(metric), *cells)
            model = parameters = ""
    table.caption = "on examples that were not used by training; mechanisms.load('zoo:NAME')"
    return table


if __name__ == "__main__":
    typer.run(run_zoo)
