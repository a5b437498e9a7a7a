"""The command line of a study: settings and resources in, the closing table out."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
import xarray as xr

from studies.engine import settings
from studies.engine.cells import documented
from studies.engine.execution import Resources, Run
from studies.engine.folders import RunError
from studies.engine.results import read_result
from studies.engine.study import Plan, Study
from studies.engine.training import TrainingError


def main(*studies: Study) -> None:
    """Run the study of a file, or the one of several that `--study` names, from the command line.

    Args:
        studies: values of the file's module; the first one is the default.

    Example:
        `if __name__ == "__main__": main(STUDY)`
    """
    named = {study.name: study for study in map(as_imported, studies)}
    default = next(iter(named))

    def run_study(
        changes: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[SETTING=VALUE]...",
                help="settings to change; several values, with commas, make an axis: seed=0,1,2",
            ),
        ] = None,
        preset: Annotated[
            str, typer.Option(help="named settings; an unknown name lists them")
        ] = "laptop",
        out: Annotated[Path, typer.Option(help="where run folders lie")] = Path("runs"),
        show: Annotated[
            bool,
            typer.Option("--show", help="print settings, cells and what is on disk; run nothing"),
        ] = False,
        measure: Annotated[
            list[str] | None,
            typer.Option(help="compute this measure anew; can be given repeatedly"),
        ] = None,
        redraw: Annotated[
            bool,
            typer.Option("--redraw", help="only the table and the figures, from what is on disk"),
        ] = False,
        fresh: Annotated[
            bool, typer.Option("--fresh", help="start over; set earlier runs aside")
        ] = False,
        accept_code: Annotated[
            bool,
            typer.Option(
                "--accept-code", help="take models that other code trained; the result says so"
            ),
        ] = False,
        device: Annotated[str, typer.Option(help="cpu, cuda or mps")] = "cpu",
        workers: Annotated[
            int, typer.Option(min=1, help="models trained side by side (on one GPU: 1)")
        ] = os.cpu_count() or 1,
        threads: Annotated[int, typer.Option(min=1, help="CPU threads of each worker")] = 1,
        scheduler: Annotated[
            str | None,
            typer.Option(help="address of a dask scheduler with workers that see the same OUT"),
        ] = None,
        # Its help follows from the file, which an annotation, read as text, cannot name.
        name: str = typer.Option(
            default, "--study", help=f"one of {', '.join(named)}", hidden=len(named) == 1
        ),
    ) -> None:
        from rich.console import Console

        console = Console()
        try:
            if name not in named:
                raise ValueError(f"--study must be one of {', '.join(named)}, got {name!r}")
            resources = Resources(
                root=out,
                device=device,
                workers=workers,
                threads=threads,
                scheduler=scheduler,
                fresh=fresh,
                accept_code=accept_code,
                anew=tuple(measure or ()),
                redraw=redraw,
            )
            work = Run(named[name].plan(preset, changes or []), resources)
        except (ValueError, RunError) as error:
            fail(console, error)
        if show:
            print_plan(work, console)
            return
        try:
            folder = work.finish()
        except (RunError, TrainingError) as error:
            fail(console, error)
        result = read_result(folder / "result.nc")
        if work.taken_from_disk:
            console.print(provenance_in_words(result), highlight=False)
        print_result(named[name], result, console)
        console.print(f"results and figures: {folder}", soft_wrap=True, highlight=False)

    run_study.__doc__ = "\n\n".join(study.question for study in named.values())
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run_study)
    app()


def fail(console: object, error: Exception) -> NoReturn:
    """Print what is wrong with the input, or with what is on disk, and end with status 1."""
    say = console.print  # pyright: ignore[reportAttributeAccessIssue]
    say("[red]error:[/red]", end=" ")
    say(str(error), highlight=False, markup=False)
    raise typer.Exit(1) from error


def print_result(study: Study, result: xr.DataTree, console: object) -> None:
    """Print the table, the claims with their verdicts, and what speaks against comparisons.

    Args:
        study: of which the result is.
        result: what its file holds.
        console: a `rich.console.Console`.
    """
    from studies.report.verdicts import render_claims, render_fairness

    say = console.print  # pyright: ignore[reportAttributeAccessIssue]
    say(study.table.render(result))
    if (claims := render_claims(result)) is not None:
        say(claims)
    for note in render_fairness(result):
        say(note, highlight=False)
    if protocol := result.attrs["selection_protocol"]:
        say(f"checkpoints chosen by {result.attrs['selection']}: {protocol}", highlight=False)
    if accepted := json.loads(result.attrs["accepted_code"]):
        files = sorted({name for names in accepted.values() for name in names})
        say(
            f"{len(accepted)} models were trained by other code; changed since: {', '.join(files)}",
            highlight=False,
        )


def provenance_in_words(result: xr.DataTree) -> str:
    """When and by which commits a result that is taken from disk was made."""
    attrs = result.attrs
    trained = json.loads(attrs["trained_at"])
    commits = [
        one.get("modscope", "unknown") for one in json.loads(attrs["git_commits_of_training"])
    ]
    analysed = json.loads(attrs["git_commits_of_analysis"]).get("modscope", "unknown")
    return (
        f"taken from disk: trained {', '.join(trained)} (commit {', '.join(commits)}), "
        f"result made {attrs['created_at']} (commit {analysed}); code has not changed since"
    )


def print_plan(work: Run, console: object) -> None:
    """Print all settings with their documentation, the cells, and what of them is on disk."""
    from rich.box import SIMPLE
    from rich.table import Table

    say = console.print  # pyright: ignore[reportAttributeAccessIssue]
    plan = work.plan
    table = Table(
        "setting", "value", "", title=f"{plan.study.name}, preset {plan.preset}", box=SIMPLE
    )
    for name, value, about in _all_settings(plan):
        axis = [grid[name] for grid in plan.grids if name in grid]
        shown = " | ".join(", ".join(map(str, values)) for values in axis) or str(value)
        table.add_row(name, shown, about)
    say(table)
    if departures := plan.study.presets.get(plan.preset):
        for name, reason in departures.departures.items():
            say(f"departs from its source in {name}: {reason}", highlight=False)
    cells = Table("cell", "", "trained", "measured", title=f"{len(work.cells)} cells", box=SIMPLE)
    for cell, setup in zip(work.cells, plan.cells, strict=True):
        values = plan.coordinates(setup)
        told = ", ".join(f"{key}={value}" for key, value in values.items() if value is not None)
        state = "yes" if cell.finished else "begun" if cell.folder.exists() else "no"
        if state != "no" and (changed := cell.other_code()):
            state += f" (other code: {', '.join(changed)})"
        done = [name for name, one in plan.measures.items() if cell.has(name, one)]
        cells.add_row(cell.name, told, state, ", ".join(done))
    say(cells)
    for name, about in documented(plan.measures).items():
        say(f"measure {name}: {about}", highlight=False)
    for claim in plan.study.claims:
        say(f"claim: {claim.statement} ({claim.source})", highlight=False)
    say(f"folder: {work.folder}", soft_wrap=True, highlight=False)


def _all_settings(plan: Plan) -> list[tuple[str, object, str]]:
    from dataclasses import is_dataclass

    found = settings.describe(plan.setup)
    for name, measure in plan.measures.items():
        if is_dataclass(measure):
            found += settings.describe(measure, f"{name}.")
    return found


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
