"""The command `modscope`: lists, runs, shows and checks studies, and checks tasks and mechanisms.

    modscope list
    modscope run raven_latent_code --preset smoke seed=0,1
    modscope run my_study.py training.n_steps=500
    modscope show runs/raven_latent_code-HASH
    modscope view runs/raven_latent_code-HASH
    modscope view runs
    modscope check my_task.py:Majority
    modscope --install-completion

A study is a file in `studies/` (without `.py`), a study of such a file by its name, or a file of
one's own; `modscope run STUDY --help` lists its options and settings.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import sys
import webbrowser
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from studies import check_shadows

if TYPE_CHECKING:
    import xarray as xr
    from rich.table import Table

    from studies.engine import Study

# Modules that import torch are imported where they are used: help and completion are quick.

FOLDER = Path(__file__).parent
RESULT = "result.nc"
"""The name of the result in the folder of a run."""

RUNS = re.compile(r"^    engine\.main\(", re.M)
"""What the file of a study ends with."""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
PASS_ON: Any = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
"""Options of commands that pass all words after the first to a study."""


def study_files() -> dict[str, Path]:
    """The files of the studies of this package, by name."""
    files = sorted(FOLDER.glob("[a-z]*.py"))
    return {path.stem: path for path in files if RUNS.search(path.read_text())}


def complete_study(incomplete: str) -> list[str]:
    """The names of studies that begin like this."""
    return [name for name in study_files() if name.startswith(incomplete)]


StudyName = Annotated[
    str,
    typer.Argument(
        metavar="STUDY", help="name of a study, or its file", autocompletion=complete_study
    ),
]
StudyFile = Annotated[
    Path | None,
    typer.Option("--study", help="the file of the study that made a result, if it is your own"),
]


@app.callback()
def modscope() -> None:
    """Compositional generalisation in small transformers: run studies, look at their results."""


@app.command("list")
def list_studies() -> None:
    """List all studies with their questions and presets."""
    from rich.box import SIMPLE
    from rich.table import Column, Table

    from studies.engine.command import console

    table = Table(Column("study", no_wrap=True), "question", "presets", box=SIMPLE)
    for stem in study_files():
        for study in studies_in(importlib.import_module(f"studies.{stem}")).values():
            presets = ", ".join(dict.fromkeys(("laptop", *study.presets)))
            table.add_row(study.name, study.question, presets)
    console().print(table)


@app.command(**PASS_ON)
def run(context: typer.Context, study: StudyName) -> None:
    """Run a study, or resume it; its own --help has all options and settings."""
    if study == "--help":
        print(context.get_help())
    else:
        run_file(study, context.args)


@app.command(**PASS_ON)
def show(context: typer.Context, what: StudyName) -> None:
    """Show the settings of a study (then any options of run), or the table of a result."""
    if what == "--help":
        print(context.get_help())
        return
    from studies.engine.command import console, exit_on, print_findings, provenance

    if not is_result(Path(what)):
        run_file(what, ["--show", *context.args])
    else:
        with exit_on(ValueError, OSError):
            result = open_result(Path(what))
            console().print(f"{result.attrs['question']}\n{provenance(result)}")
            print_findings(result, table_of(result, option_study(context.args)))


@app.command()
def view(
    what: Annotated[
        Path, typer.Argument(metavar="RESULT", help="result file, folder of a run, or of many runs")
    ],
    study: StudyFile = None,
    to: Annotated[Path | None, typer.Option(help="the page; by default beside the result")] = None,
    open_: Annotated[bool, typer.Option("--open", help="open the page in the browser")] = False,
) -> None:
    """Make the page of a result, with interactive figures; of many runs, one that compares them."""
    from studies.engine import RunError
    from studies.engine.command import console, exit_on
    from studies.report.page import ReportError

    with exit_on(ValueError, OSError, RunError, ReportError):
        path = view_runs(what, to) if is_of_many(what) else view_result(what, study, to)
    console().print(f"page: {path}", soft_wrap=True)
    if open_:
        webbrowser.open(path.resolve().as_uri())


@app.command()
def check(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="FILE.py:NAME (a task, a component, or a study or setup, of which both are "
            "checked), or a result file, which is checked against the schema",
        ),
    ],
    inputs: Annotated[
        str | None,
        typer.Option(help="of a component: the variable of the file with what it is called with"),
    ] = None,
) -> None:
    """Check a task or a mechanism of your own, or a result, and say what is broken."""
    from studies.engine.command import exit_on

    with exit_on(ValueError, TypeError, OSError):
        if is_result(Path(what)):
            open_result(Path(what))
        else:
            check_object(what, inputs)
    print(f"{what}: nothing is broken")


def run_file(study: str, words: list[str]) -> None:
    """Run the file of a study as a script, with words of the command line.

    Workers find the study as they do when it is run without this command.
    """
    from studies.engine.command import exit_on

    with exit_on(ValueError, ImportError):
        path, chosen = file_of(study)
        if str(path.parent) not in sys.path and path.parent != FOLDER:
            sys.path.insert(0, str(path.parent))
            check_shadows()
    sys.argv = [str(path), *chosen, *words]
    runpy.run_path(str(path), run_name="__main__")


def file_of(study: str) -> tuple[Path, list[str]]:
    """The file of a study, and the option that chooses it there.

    Raises:
        ValueError: there is no such study.
    """
    files, path = study_files(), Path(study)
    if study in files:
        return files[study], []
    if path.suffix == ".py" and path.exists():
        return path.resolve(), []
    names = dict.fromkeys(files)
    if path.suffix != ".py":
        for stem, of_package in files.items():
            others = studies_in(importlib.import_module(f"studies.{stem}"))
            if study in others:
                return of_package, ["--study", study]
            names |= dict.fromkeys(others)
    nearest = get_close_matches(study, names, n=3)
    known = f"nearest: {', '.join(nearest)}" if nearest else f"studies are {', '.join(names)}"
    if path.suffix == ".py":
        known = f"there is no such file; {known}"
    raise ValueError(f"STUDY must be a study or a file FILE.py, got {study!r}; {known}")


def studies_in(module: Any) -> dict[str, Study]:
    """The studies among the variables of a module, by their names."""
    from studies.engine import Study

    return {value.name: value for value in vars(module).values() if isinstance(value, Study)}


def is_result(path: Path) -> bool:
    """Whether a path is a result file, or the folder of a run."""
    return path.suffix == ".nc" or path.is_dir()


def open_result(path: Path) -> xr.DataTree:
    """The result in a file, or in the folder of a run.

    Raises:
        FileNotFoundError: there is none.
        SchemaError: it does not follow the schema.
    """
    from studies.engine import SchemaError, read_result

    file = path / RESULT if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(f"a result must be a file or the folder of a run, got {path}")
    try:
        return read_result(file)
    except OSError as error:
        raise SchemaError(f"{file} must be a netCDF file: {error}") from error


def is_of_many(path: Path) -> bool:
    """Whether a path is a folder of runs, rather than that of one."""
    return path.is_dir() and not (path / RESULT).exists()


def view_result(what: Path, study_file: Path | None, to: Path | None) -> Path:
    """Make the page of a result, and return its path."""
    from studies.engine.folders import write_atomically
    from studies.report.page import exhibits_of, page_of, report

    result, file = open_result(what), what / RESULT if what.is_dir() else what
    study, path = study_of(result, study_file), to or page_of(file)
    exhibits = [] if study is None else list(exhibits_of(result, study))
    data = os.path.relpath(file, path.parent)
    page = report(result, study, exhibits, Path(data).as_posix())
    write_atomically(path, lambda to: to.write_text(page, encoding="utf-8"))
    return path


def view_runs(folder: Path, to: Path | None) -> Path:
    """Make the page that compares the results in a folder, and return its path.

    Raises:
        ValueError: there are none.
    """
    from studies.engine import results
    from studies.engine.folders import write_atomically
    from studies.report.page import INDEX, index

    path = to or folder / INDEX
    # The folders of models have a file for each measure.
    found = [file for file in sorted(folder.rglob("[!.]*.nc")) if results.is_result(file)]
    if not found:
        raise ValueError(f"RESULT must have results in it, got {folder}")
    files = {os.path.relpath(file, path.parent): file for file in found}
    page = index({name: open_result(file) for name, file in files.items()})
    write_atomically(path, lambda to: to.write_text(page, encoding="utf-8"))
    return path


def option_study(words: list[str]) -> Path | None:
    """The file after `--study` among the words behind a result.

    Raises:
        ValueError: there are other words.
    """
    match words:
        case []:
            return None
        case ["--study", file]:
            return Path(file)
    raise ValueError(f"options of a result must be --study FILE.py, got {' '.join(words)}")


def study_of(result: xr.DataTree, file: Path | None) -> Study | None:
    """The study that made a result: of a file, or of this package; None if it is neither.

    Raises:
        ValueError: the file has no such study.
    """
    from studies.zoo import all_studies

    name = result.attrs["study"]
    if file is None:
        return all_studies().get(name)
    known = studies_in(import_file(file))
    if name not in known:
        raise ValueError(f"{file} must have the study {name}, got {', '.join(known) or 'none'}")
    return known[name]


def table_of(result: xr.DataTree, file: Path | None) -> Table:
    """The table of the study that made a result; without it, all that its summary holds."""
    from studies.report.table import render_summary

    study = study_of(result, file)
    return render_summary(result) if study is None else study.table.render(result)


def import_file(path: Path) -> Any:
    """A file as a module, beside which its other modules are found.

    Raises:
        ValueError: it is no Python file.
    """
    if path.suffix != ".py" or not path.exists():
        raise ValueError(f"FILE must be a Python file, got {path}")
    sys.path.insert(0, str(path.resolve().parent))
    return importlib.import_module(path.stem)


def check_object(name: str, inputs: str | None) -> None:
    """Check what a file defines under a name, after a colon.

    Raises:
        ValueError: something is broken, or there is no such thing.
        TypeError: it is nothing that can be checked.
    """
    import torch

    import mechanisms
    import tasks
    from studies.engine import Setup, Study

    file, colon, variable = name.rpartition(":")
    if not colon:
        raise ValueError(f"WHAT must be FILE.py:NAME or a result file, got {name!r}")
    module = vars(import_file(Path(file)))
    value: Any = named(module, variable, file)
    # A class, or a function that builds.
    value = value() if callable(value) and not isinstance(value, torch.nn.Module) else value
    if isinstance(value, Study):
        value = value.setup
    if isinstance(value, Setup):
        tasks.check(value.sampler())
        batch = value.sampler().batch(value.selection.split, 0, 3)
        model = value.build(torch.Generator().manual_seed(0))
        mechanisms.check(model, batch.inputs, build=value.build)
    elif isinstance(value, torch.nn.Module):
        if inputs is None:
            raise ValueError(f"--inputs must name what {variable} is called with, got nothing")
        mechanisms.check(value, named(module, inputs, file))
    else:
        tasks.check(value)


def named(variables: Mapping[str, Any], name: str, file: str) -> Any:
    """A variable of a file.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in variables:
        public = [one for one in variables if not one.startswith("_")]
        nearest = get_close_matches(name, public, n=3) or public
        raise ValueError(f"NAME must be defined in {file}, got {name!r}; has {', '.join(nearest)}")
    return variables[name]
