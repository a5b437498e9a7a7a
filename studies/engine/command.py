"""The command line of a study: parses settings and resources, runs, and prints the results."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import xarray as xr
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from studies.engine import settings
from studies.engine.execution import Resources, Run
from studies.engine.folders import REPORT, RunError
from studies.engine.results import SchemaError, read_result
from studies.engine.study import Study
from studies.engine.training import TrainingError
from studies.report.table import plain_console
from studies.report.verdicts import render_claims, render_fairness

FILE_WIDTH = 100
"""Line width, in characters, of output that goes to a file or pipe."""

Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SETTING=VALUE]...",
        help="settings to change; several values, separated by commas, make an axis: seed=0,1,2",
    ),
]
Preset = Annotated[str, typer.Option(help="named settings; an unknown name lists the known ones")]
Show = Annotated[
    bool, typer.Option("--show", help="print settings, cells and their state on disk; run nothing")
]
OPTION_NAMES = {"root": "--out", "anew": "--measure"}
"""Options for fields of `Resources` whose name differs from the field's."""


def main(*studies: Study) -> None:
    """Run a study of a file from the command line.

    Args:
        studies: variables of the file's module. With several, `--study` chooses one by name; the
            first is the default.

    Example:
        `if __name__ == "__main__": main(STUDY)`
    """
    with exit_on(ValueError):
        by_name = {study.name: study for study in map(as_imported, studies)}
    names = ", ".join(by_name)

    def run_study(
        changes: Changes = None,
        preset: Preset = "laptop",
        show: Show = False,
        # No Annotated: annotations are evaluated from text, which cannot refer to `names`.
        study: str = typer.Option(
            next(iter(by_name)), help=f"one of {escape(names)}", hidden=len(by_name) == 1
        ),
        **resources: Any,
    ) -> None:
        with exit_on(ValueError, settings.SettingTypeError, RunError):
            if study not in by_name:
                raise ValueError(f"--study must be one of {names}, got {study!r}")
            run = Run(by_name[study].plan(preset, changes or []), Resources(**resources))
        with exit_on(RunError, TrainingError, SchemaError):
            if show:
                print_plan(run)
                return
            run.finish()
        print_result(run)

    signature = inspect.signature(run_study, eval_str=True)
    *parameters, _ = signature.parameters.values()
    run_study.__signature__ = signature.replace(parameters=[*parameters, *resource_options()])  # pyright: ignore[reportFunctionMemberAccess]
    run_study.__doc__ = "\n\n".join(escape(study.question) for study in by_name.values())
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=settings_help(by_name.values()))(run_study)
    app()


def settings_help(studies: Iterable[Study]) -> str:
    """All settings of studies for their help, a line each: name, default and documentation.

    A setting of several studies has the default of the first one.
    """
    lines = {"": "Settings, with their defaults at laptop size (models may imply others):"}
    for name, value, documentation in (row for study in studies for row in study.settings):
        summary = textwrap.shorten(documentation, FILE_WIDTH, placeholder=" ...")
        line = f"{escape(f'{name}={settings.text_of(value)}')}  [dim]{escape(summary)}[/dim]"
        lines.setdefault(name, line)
    return "\n".join(lines.values())


def resource_options() -> Iterator[inspect.Parameter]:
    """One option for each field of `Resources`, with its documentation as help."""
    hints = get_type_hints(Resources)
    for name, value, documentation in settings.describe(Resources(workers=os.cpu_count() or 1)):
        # Typer takes an option that can be repeated as a list.
        option_type, default = (list[str], []) if value == () else (hints[name], value)
        flag = OPTION_NAMES.get(name, f"--{name.replace('_', '-')}")
        annotation = Annotated[option_type, typer.Option(flag, help=documentation)]
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )


def console(*tables: Table) -> Console:
    """The console for output, wide enough for whole tables where it is a file or pipe."""
    terminal = plain_console(highlight=False)
    if terminal.is_terminal:
        return terminal
    width = max(map(width_of, tables), default=FILE_WIDTH)
    return plain_console(highlight=False, width=width)


def width_of(table: Table) -> int:
    """The width of a table in a file: `FILE_WIDTH`, or where that cuts words off, its own width."""
    unlimited = plain_console(width=10_000)
    measured = Measurement.get(unlimited, unlimited.options, table)
    return FILE_WIDTH if measured.minimum <= FILE_WIDTH else measured.maximum


@contextmanager
def exit_on(*errors: type[Exception]) -> Iterator[None]:
    """Turn expected errors into a printed message and exit status 1."""
    try:
        yield
    except errors as error:
        write = console().print
        write("error:", style="red", end=" ")
        # Whole paths, which can be copied: the terminal breaks lines itself.
        write(str(error), soft_wrap=True)
        raise typer.Exit(1) from error


def print_result(run: Run) -> None:
    """Print what a run has found, see `print_findings`, and where its files are."""
    result = read_result(run.folder / "result.nc")
    if run.taken_from_disk:
        made = f"taken from disk: {provenance(result)}; code has not changed since"
        console().print(made)
    print_findings(result, run.plan.study.table.render(result))
    console().print(f"results and figures: {run.folder}", soft_wrap=True)
    if (page := run.folder / REPORT).exists():
        console().print(f"to look at them in a browser: {page}", soft_wrap=True)


def print_findings(result: xr.DataTree, table: Table) -> None:
    """Print the table, the claims with their verdicts, and notes on fairness and provenance."""
    write = console(table).print
    write(table)
    if (claims := render_claims(result)) is not None:
        write(claims)
    for note in render_fairness(result):
        write(note)
    if protocol := result.attrs["selection_protocol"]:
        write(f"checkpoints chosen by {result.attrs['selection']}: {protocol}")
    if accepted := json.loads(result.attrs["accepted_code"]):
        files = ", ".join(sorted({name for names in accepted.values() for name in names}))
        write(f"{len(accepted)} models were trained by other code; changed since: {files}")
    if from_zoo := json.loads(result.attrs["from_zoo"]):
        names = ", ".join(sorted(from_zoo.values()))
        write(f"{len(from_zoo)} models were not trained here, but are from the zoo: {names}")


def provenance(result: xr.DataTree) -> str:
    """A sentence that says when, and from which commits, a stored result was made."""
    attrs = result.attrs
    trained = ", ".join(json.loads(attrs["trained_at"]))
    training_commits = json.loads(attrs["git_commits_of_training"])
    commits = ", ".join(sources.get("modscope", "unknown") for sources in training_commits)
    analysed = json.loads(attrs["git_commits_of_analysis"]).get("modscope", "unknown")
    return (
        f"trained {trained} (commit {commits}), "
        f"result made {attrs['created_at']} (commit {analysed})"
    )


def print_plan(run: Run) -> None:
    """Print all settings with their documentation, and the cells with their state on disk."""
    write, plan = console().print, run.plan
    title = f"{plan.study.name}, preset {plan.preset}"
    table = Table("setting", "value", "", title=title, box=SIMPLE)
    for name, value, documentation in plan.settings:
        axis = [", ".join(map(str, grid[name])) for grid in plan.grids if name in grid]
        table.add_row(name, " | ".join(axis) or str(value), documentation)
    write(table)
    if preset := plan.study.presets.get(plan.preset):
        for name, reason in preset.departures.items():
            write(f"departs from its source in {name}: {reason}")
    cells = Table("cell", "", "trained", "measured", title=f"{len(run.cells)} cells", box=SIMPLE)
    for cell, setup in zip(run.cells, plan.cells, strict=True):
        values = plan.coordinates(setup).items()
        state = "yes" if cell.finished else "begun" if cell.folder.exists() else "no"
        if cell.zoo_name is not None:
            state = f"in the zoo: {cell.zoo_name}"
        if state != "no" and (changed := cell.other_code()):
            state += f" (other code: {', '.join(changed)})"
        cells.add_row(
            cell.name,
            ", ".join(f"{key}={value}" for key, value in values if value is not None),
            state,
            ", ".join(filter(cell.has, plan.measures)),
        )
    write(cells)
    for name, measure in plan.measures.items():
        summary = (measure.__doc__ or "").strip().partition("\n")[0]
        write(f"measure {name}: {summary}")
    for claim in plan.study.claims:
        write(f"claim: {claim.statement} ({claim.source})")
    write(f"folder: {run.folder}", soft_wrap=True)


def as_imported(study: Study) -> Study:
    """The same study, taken from its file imported as a module.

    A script runs as `__main__`, under which worker processes could not find its classes.

    Raises:
        ValueError: the file does not define the study when it is imported, or its name has dots.
    """
    script = sys.modules["__main__"]
    path = getattr(script, "__file__", None)
    name = next((key for key, value in vars(script).items() if value is study), None)
    if path is None or name is None:
        return study
    file = Path(path).resolve()
    if "." in file.stem:
        raise ValueError(
            f"a file of studies must have a name without further dots, got {file.name}: worker "
            "processes import it by its name"
        )
    package, folder = [file.stem], file.parent
    while (folder / "__init__.py").exists():
        package, folder = [folder.name, *package], folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = importlib.import_module(".".join(package))
    if not hasattr(module, name):
        raise ValueError(
            f"{name} must be defined at the top level of {file.name}, outside of "
            "`if __name__ == '__main__'`: worker processes import it from there"
        )
    return getattr(module, name)
