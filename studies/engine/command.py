"""The command line of a study: settings and resources in, the closing table out."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import xarray as xr
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from studies.engine import settings
from studies.engine.execution import Resources, Run
from studies.engine.folders import RunError
from studies.engine.results import read_result
from studies.engine.study import Study
from studies.engine.training import TrainingError
from studies.report.verdicts import render_claims, render_fairness

FILE_WIDTH = 100
"""Characters of a line of output that no terminal shows."""

Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SETTING=VALUE]...",
        help="settings to change; several values, with commas, make an axis: seed=0,1,2",
    ),
]
Preset = Annotated[str, typer.Option(help="named settings; an unknown name lists them")]
Show = Annotated[
    bool, typer.Option("--show", help="print settings, cells and what is on disk; run nothing")
]
NAMES = {"root": "--out", "anew": "--measure"}
"""Options of `Resources` that are not called like their fields."""


def main(*studies: Study) -> None:
    """Run the study of a file, or the one of several that `--study` names, from the command line.

    Args:
        studies: values of the file's module; the first one is the default.

    Example:
        `if __name__ == "__main__": main(STUDY)`
    """
    named = {study.name: study for study in map(as_imported, studies)}
    names = ", ".join(named)

    def run_study(
        changes: Changes = None,
        preset: Preset = "laptop",
        show: Show = False,
        # Its help follows from the file, which an annotation, read as text, cannot name.
        study: str = typer.Option(
            next(iter(named)), help=f"one of {names}", hidden=len(named) == 1
        ),
        **resources: Any,
    ) -> None:
        with errors_in_words(ValueError, RunError):
            if study not in named:
                raise ValueError(f"--study must be one of {names}, got {study!r}")
            work = Run(named[study].plan(preset, changes or []), Resources(**resources))
        if show:
            print_plan(work)
            return
        with errors_in_words(RunError, TrainingError):
            work.finish()
        print_result(work)

    signature = inspect.signature(run_study, eval_str=True)
    *own, _ = signature.parameters.values()
    run_study.__signature__ = signature.replace(parameters=[*own, *resource_options()])  # pyright: ignore[reportFunctionMemberAccess]
    run_study.__doc__ = "\n\n".join(study.question for study in named.values())
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run_study)
    app()


def resource_options() -> Iterator[inspect.Parameter]:
    """An option for each field of `Resources`, with its documentation as help."""
    hints = get_type_hints(Resources)
    for name, value, about in settings.describe(Resources(workers=os.cpu_count() or 1)):
        # An option that can be given several times is a list.
        kind, default = (list[str], []) if value == () else (hints[name], value)
        option = typer.Option(NAMES.get(name, f"--{name.replace('_', '-')}"), help=about)
        annotation = Annotated[kind, option]
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )


def console() -> Console:
    """Where output goes; in files and pipes lines have room for whole tables."""
    usual = Console(highlight=False)
    return usual if usual.is_terminal else Console(highlight=False, width=FILE_WIDTH)


@contextmanager
def errors_in_words(*kinds: type[Exception]) -> Iterator[None]:
    """Print what is wrong with the input, or with what is on disk, and end with status 1."""
    try:
        yield
    except kinds as error:
        say = console().print
        say("[red]error:[/red]", end=" ")
        say(str(error), markup=False)
        raise typer.Exit(1) from error


def print_result(work: Run) -> None:
    """Print the table, the claims with their verdicts, and what speaks against comparisons."""
    result = read_result(work.folder / "result.nc")
    say = console().print
    if work.taken_from_disk:
        say(provenance_in_words(result))
    say(work.plan.study.table.render(result))
    if (claims := render_claims(result)) is not None:
        say(claims)
    for note in render_fairness(result):
        say(note)
    if protocol := result.attrs["selection_protocol"]:
        say(f"checkpoints chosen by {result.attrs['selection']}: {protocol}")
    if accepted := json.loads(result.attrs["accepted_code"]):
        files = ", ".join(sorted({name for names in accepted.values() for name in names}))
        say(f"{len(accepted)} models were trained by other code; changed since: {files}")
    say(f"results and figures: {work.folder}", soft_wrap=True)


def provenance_in_words(result: xr.DataTree) -> str:
    """When and by which commits a result that is taken from disk was made."""
    attrs = result.attrs
    trained = ", ".join(json.loads(attrs["trained_at"]))
    of_training = json.loads(attrs["git_commits_of_training"])
    commits = ", ".join(one.get("modscope", "unknown") for one in of_training)
    analysed = json.loads(attrs["git_commits_of_analysis"]).get("modscope", "unknown")
    return (
        f"taken from disk: trained {trained} (commit {commits}), "
        f"result made {attrs['created_at']} (commit {analysed}); code has not changed since"
    )


def print_plan(work: Run) -> None:
    """Print all settings with their documentation, the cells, and what of them is on disk."""
    say, plan = console().print, work.plan
    title = f"{plan.study.name}, preset {plan.preset}"
    table = Table("setting", "value", "", title=title, box=SIMPLE)
    for name, value, about in plan.settings:
        axis = [", ".join(map(str, grid[name])) for grid in plan.grids if name in grid]
        table.add_row(name, " | ".join(axis) or str(value), about)
    say(table)
    if preset := plan.study.presets.get(plan.preset):
        for name, reason in preset.departures.items():
            say(f"departs from its source in {name}: {reason}")
    cells = Table("cell", "", "trained", "measured", title=f"{len(work.cells)} cells", box=SIMPLE)
    for cell, setup in zip(work.cells, plan.cells, strict=True):
        values = plan.coordinates(setup).items()
        state = "yes" if cell.finished else "begun" if cell.folder.exists() else "no"
        if state != "no" and (changed := cell.other_code()):
            state += f" (other code: {', '.join(changed)})"
        cells.add_row(
            cell.name,
            ", ".join(f"{key}={value}" for key, value in values if value is not None),
            state,
            ", ".join(filter(cell.has, plan.measures)),
        )
    say(cells)
    for name, measure in plan.measures.items():
        about = (measure.__doc__ or "").strip().partition("\n")[0]
        say(f"measure {name}: {about}")
    for claim in plan.study.claims:
        say(f"claim: {claim.statement} ({claim.source})")
    say(f"folder: {work.folder}", soft_wrap=True)


def as_imported(study: Study) -> Study:
    """The same study from the module that its file is when it is imported.

    What runs as a script is `__main__`, by which no worker could find its classes again.
    """
    script = sys.modules["__main__"]
    path = getattr(script, "__file__", None)
    name = next((key for key, value in vars(script).items() if value is study), None)
    if path is None or name is None:
        return study
    file = Path(path).resolve()
    package, folder = [file.stem], file.parent
    while (folder / "__init__.py").exists():
        package, folder = [folder.name, *package], folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return getattr(importlib.import_module(".".join(package)), name)
