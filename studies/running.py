"""What every study does around its own question: models side by side, one result, one table."""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, cast

import numpy as np
import torch
import typer
import xarray as xr
from jaxtyping import Float

from studies.runs import (
    RunError,
    config_hash,
    locked,
    open_folder,
    provenance,
    write_atomically,
)
from studies.settings import from_plain, override
from studies.training import TrainingError, process_device

if TYPE_CHECKING:
    from distributed import Client
    from matplotlib.figure import Figure
    from rich.console import RenderableType

Study = TypeVar("Study")


class ModelConfig(Protocol):
    """One model and how it is trained: a frozen config that names its run folder."""

    @property
    def task(self) -> object:
        """The config of what it is trained on."""
        ...

    @property
    def folder_name(self) -> str:
        """The name of its run folder, under `models/`."""
        ...


class Cell(ModelConfig, Protocol):
    """One model of a grid that is not full."""

    @property
    def condition(self) -> Mapping[str, Any]:
        """The settings that tell it from others: a string or a number each."""
        ...


class GridStudy(Protocol):
    """The settings of a study that trains a model for each cell of a grid."""

    @property
    def seeds(self) -> Sequence[int]:
        """Every model is trained once for each."""
        ...

    def tasks(self) -> Sequence[object]:
        """The configs of what models are trained on."""
        ...

    def trained_models(self) -> Sequence[Cell]:
        """The cells."""
        ...


Model = TypeVar("Model", bound=ModelConfig)

Train = Callable[..., Path]
"""(model, *, root, device, position) -> its run folder, trained or trained to the end."""

Analyse = Callable[[Any, Path, str], xr.DataTree]
"""(model, run folder, device) -> everything that is looked at in it."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Where and with what a study runs.

    Attributes:
        root: folder under which the folders of the study and of its models lie.
        device: where models run: `cpu`, `cuda`, `mps`.
        workers: models that are trained and analysed side by side; a scheduler has its own.
        threads: CPU threads of each of them. The last bits of a result depend on it.
        scheduler: address of a running dask scheduler whose workers do so instead. They have
            modscope installed, and see `root` under the same absolute path.
        fresh: do not go on from, but move aside, what an earlier run left.
    """

    root: Path
    device: str = "cpu"
    workers: int = 1
    threads: int = 1
    scheduler: str | None = None
    fresh: bool = False


def run_models(
    name: str,
    *,
    identity: object,
    models: Sequence[ModelConfig],
    train: Train,
    analyse: Analyse,
    assemble: Callable[[list[xr.DataTree]], xr.DataTree],
    figures: Callable[[xr.DataTree], dict[str, Figure]],
    seed: object,
    resources: Resources,
    checkpoints: Sequence[Path] = (),
) -> Path:
    """Train and analyse models, put their results together and draw; gives the study's folder.

    What was finished before is not done again. Under `accelerate launch` or `torchrun` (with one
    worker) the processes train each model together.

    Args:
        name: of the study; its folder is `NAME-HASH`.
        identity: the settings that make the result what it is.
        models: what to train.
        train: see `Train`; called in a process of its own when there are several workers.
        analyse: see `Analyse`; likewise.
        assemble: the models' analyses, in order -> the result.
        figures: the result -> figures by file name.
        seed: for the result's attributes.
        resources: where and with what.
        checkpoints: run folders of these models, to be analysed instead of training any.

    Raises:
        RunError: a folder cannot be used, a checkpoint is damaged, or see `run_side_by_side`.
        TrainingError: a loss is not finite.
    """
    rank, device = process_device(resources.device)
    root = resources.root
    folder = root / f"{name}-{config_hash(identity)}"
    places = [folder / "models" / f"{model.folder_name}.nc" for model in models]
    if rank > 0:
        # Processes that share the training of a model leave the rest to the first one.
        for number, model in enumerate([] if checkpoints else models):
            if resources.fresh or not places[number].exists():
                train(model, root=root, device=device, position=number)
        raise SystemExit(0)
    if (folder / "result.nc").exists() and not resources.fresh:
        return folder
    if resources.fresh and not checkpoints:
        for model in models:
            open_folder(root / "models" / model.folder_name, model, fresh=True)
    open_folder(folder, identity, fresh=resources.fresh)

    # Workers elsewhere need not be in this process's directory.
    here = root.absolute()
    jobs = [
        functools.partial(
            _one_model,
            model,
            train=None if checkpoints else functools.partial(train, root=here, position=number),
            analyse=analyse,
            folder=checkpoints[number].absolute() if checkpoints else None,
            place=places[number].absolute(),
            device=device,
            threads=resources.threads,
        )
        for number, model in enumerate(models)
    ]
    trees = []
    for place in run_side_by_side(
        jobs,
        resources.workers,
        scheduler=resources.scheduler,
        names=[model.folder_name for model in models],
    ):
        with xr.open_datatree(place, engine="h5netcdf") as tree:
            trees.append(tree.load())
    result = assemble(trees)
    result.attrs = provenance(identity, seed=seed, device=device)
    # The result comes last: where it is, the figures are too.
    draw(result, folder, figures)
    write_atomically(folder / "result.nc", functools.partial(write_compressed, result))
    return folder


def run_grid(
    name: str,
    study: GridStudy,
    *,
    kind: type,
    train: Train,
    analyse: Callable[[Any, Any, Path, str], xr.DataTree],
    assemble: Callable[[Any, list[xr.DataTree]], xr.DataTree],
    figures: Callable[[xr.DataTree], dict[str, Figure]],
    resources: Resources,
    checkpoints: Sequence[Path] = (),
) -> Path:
    """`run_models` for the cells of a study's grid, or for trained ones; gives the study's folder.

    Args:
        study: names the cells; all its settings make the result what it is.
        kind: class of the cells' configs.
        train: see `Train`.
        analyse: (study, cell, run folder, device) -> everything that is looked at in it.
        assemble: (cells, their analyses) -> the result.
        name, figures, resources, checkpoints: see `run_models`.

    Raises:
        RunError: also if a checkpoint is none of a `kind`, or was trained on none of the tasks.
        TrainingError: see `run_models`.
    """
    loaded = [load_model_config(place, kind, study.tasks()) for place in checkpoints]
    cells = loaded or study.trained_models()
    return run_models(
        name,
        identity={"study": study, "checkpoints": loaded},
        models=cells,
        train=train,
        analyse=functools.partial(analyse, study),
        assemble=functools.partial(assemble, cells),
        figures=figures,
        seed=study.seeds,
        resources=resources,
        checkpoints=checkpoints,
    )


def load_model_config(folder: Path, kind: type[Model], tasks: Sequence[object]) -> Model:
    """The config of the model that a run folder holds, of class `kind`.

    Raises:
        RunError: it is no run folder of such a model, or its task is none of the study's.
    """
    try:
        content = json.loads((folder / "config.json").read_text())
        found = from_plain(kind, content["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder} is no run folder of a {kind.__name__}: {error}") from error
    if found.task not in tasks:
        asked = " or ".join(str(one) for one in tasks)
        raise RunError(f"{folder} was trained on {found.task}, the study asks for {asked}")
    return found


def merge(trees: Sequence[xr.DataTree], places: Sequence[Mapping[str, str | int]]) -> xr.DataTree:
    """One tree of all models' analyses, with dims that say which model a part is of.

    A group may be missing in some of the trees.

    Args:
        trees: the analyses.
        places: of each of them the coordinates, for example `{"model": "hyla", "seed": 0}`; their
            values come in the order of their first occurrence.
    """
    merged = {}
    for name in dict.fromkeys(name for tree in trees for name in tree.children):
        present = [(t, p) for t, p in zip(trees, places, strict=True) if name in t.children]
        parts = [
            tree[name].to_dataset().expand_dims({dim: [value] for dim, value in place.items()})
            for tree, place in present
        ]
        # Labels that differ, such as training steps, would else be taken for one series.
        parts = xr.align(*parts, join="outer", exclude=list(places[0]))
        joined = xr.combine_by_coords(parts, join="outer", combine_attrs="drop_conflicts")
        order = {dim: list(dict.fromkeys(p[dim] for _, p in present)) for dim in places[0]}
        # Whole numbers from a file would be written as such again, also where they are missing.
        merged[name] = joined.reindex(order).drop_encoding()
    return xr.DataTree.from_dict(merged)


def join_cells(trees: Sequence[xr.DataTree], cells: Sequence[Cell]) -> xr.DataTree:
    """One tree of all models' analyses along `cell`, with a coordinate for each of its settings.

    For grids that are not full, and groups that only some of the models have.

    Args:
        trees: the analyses.
        cells: the models, in the same order; all conditions have the same names.

    Raises:
        ValueError: a setting has the name of a variable.
    """
    groups = {}
    for name in dict.fromkeys(name for tree in trees for name in tree.children):
        present = [(c, t) for c, t in zip(cells, trees, strict=True) if name in t.children]
        parts = [
            tree[name].to_dataset().expand_dims(cell=[cell.folder_name]) for cell, tree in present
        ]
        joined = xr.concat(parts, "cell", join="outer", combine_attrs="drop_conflicts")
        # Strings are sorted by an outer join; their first occurrence tells more.
        for dim in joined.dims:
            if dim in joined.coords and joined[dim].dtype.kind in "OUT":
                order = dict.fromkeys(one for part in parts for one in part[dim].to_numpy())
                joined = joined.reindex({dim: list(order)})
        told = [cell.condition for cell, _ in present]
        if clash := sorted(told[0].keys() & set(joined.data_vars)):
            raise ValueError(
                f"conditions must not have names of variables of {name}: {', '.join(clash)}"
            )
        joined = joined.assign_coords(
            {key: ("cell", [values[key] for values in told]) for key in told[0]}
        )
        # Whole numbers from a file would be written as such again, also where they are missing.
        groups[name] = joined.drop_encoding()
    return xr.DataTree.from_dict(groups)


def run_side_by_side(
    jobs: Sequence[Callable[[], Path]],
    workers: int,
    *,
    scheduler: str | None = None,
    names: Sequence[str] | None = None,
) -> list[Path]:
    """Call jobs, several at once in processes of their own; gives their results in order.

    With one worker or one job, and no scheduler, they are called one after another in this
    process, and the first error ends that. Otherwise a job whose process dies is called again,
    up to three times, and one that raises an error keeps no other from being called.

    Args:
        jobs: what to call; picklable.
        workers: processes on this machine, with which a job each is busy.
        scheduler: address of a dask scheduler whose workers are used instead.
        names: of the jobs, for errors; their numbers by default.

    Raises:
        RunError: a job's process died each time, or the scheduler is out of reach.
        RunError, TrainingError, ValueError: a job raised it; the message says which job, and how
            many others failed.
        RuntimeError: a job raised another error, which is the cause of this one.
    """
    if scheduler is None and (workers <= 1 or len(jobs) <= 1):
        return [job() for job in jobs]
    with _connected(min(workers, len(jobs)), scheduler) as client:
        outcomes = _outcomes(client, jobs)
    failed = {n: one for n, one in enumerate(outcomes) if isinstance(one, Exception)}
    for number, error in failed.items():
        kinds = (RunError, TrainingError, ValueError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
        name = names[number] if names else f"job {number}"
        raise kind(f"{name}: {error} ({len(failed)} of {len(jobs)} failed)") from error
    return [one for one in outcomes if not isinstance(one, Exception)]


def write_compressed(result: xr.DataTree, path: Path) -> None:
    """Write a result as netCDF, its arrays of numbers compressed."""
    encoding = {
        group.path: {
            name: {"zlib": True}
            for name, values in group.data_vars.items()
            if values.ndim and values.dtype.kind in "biuf"
        }
        for group in result.subtree
    }
    result.to_netcdf(path, engine="h5netcdf", encoding=encoding)


def draw(
    result: xr.DataTree, folder: Path, figures: Callable[[xr.DataTree], dict[str, Figure]]
) -> None:
    """Draw every figure of a result into `folder`, as PNG and PDF."""
    for name, figure in figures(result).items():
        for kind in ("png", "pdf"):
            write_atomically(
                folder / f"{name}.{kind}",
                functools.partial(figure.savefig, dpi=150, bbox_inches="tight"),
            )


def over_seeds(
    figures: Mapping[str, Float[np.ndarray, " cell"]], groups: Sequence[Sequence[int]]
) -> xr.Dataset:
    """`mean`, `lowest` and `highest` [condition, figure] of cells that differ in their seed alone.

    Args:
        figures: by name, a number for each cell.
        groups: the numbers of the cells of each condition.
    """
    reductions = {
        "mean": (np.mean, "mean over seeds"),
        "lowest": (np.min, "least of all seeds"),
        "highest": (np.max, "greatest of all seeds"),
    }
    return xr.Dataset(
        {
            name: (
                ("condition", "figure"),
                [[reduce(values[list(cells)]) for values in figures.values()] for cells in groups],
                {"long_name": about},
            )
            for name, (reduce, about) in reductions.items()
        },
        coords={"figure": list(figures)},
    )


def describe_coordinates(result: xr.DataTree, long_names: dict[str, str]) -> None:
    """Give every coordinate that has none its `long_name`: that of its name, or the name itself."""
    for group in result.subtree:
        for name, coordinate in group.coords.items():
            coordinate.attrs.setdefault("long_name", long_names.get(str(name), str(name)))


def percent(data: xr.Dataset, name: str) -> str:
    """Mean over seeds; in brackets the interval of a single seed, or the range of several."""
    values = data[name].dropna("seed").to_numpy()
    if values.size == 0:
        return ""
    if values.size == 1:
        low, high = data[f"{name}_low"].max().item(), data[f"{name}_high"].max().item()
    else:
        low, high = values.min(), values.max()
    return f"{100 * values.mean():.1f} [{100 * low:.0f}-{100 * high:.0f}]"


def command(
    *,
    question: str,
    presets: Callable[..., dict[str, Study]],
    run: Callable[..., Path],
    table: Callable[[xr.DataTree], RenderableType],
    tasks: Sequence[str] = (),
) -> None:
    """The command line of a study: settings and resources in, the closing table out.

    Args:
        question: what `--help` says first.
        presets: the settings by name; `laptop` is the default. Where there are `tasks` it is
            called with the one that `--task` names.
        run: (study, resources=, checkpoints=) -> the study's folder.
        table: the result -> the table that answers the question.
        tasks: what `--task` can be, first the default; a study without them has no such option.
    """

    def main(
        settings: Annotated[
            list[str] | None,
            typer.Argument(help="settings to change, as key=value: seeds=0,1"),
        ] = None,
        preset: Annotated[
            str, typer.Option(help="named settings; an unknown name lists them")
        ] = "laptop",
        checkpoint: Annotated[
            list[Path] | None,
            typer.Option(help="run folder of a trained model to analyse; can be given repeatedly"),
        ] = None,
        out: Annotated[Path, typer.Option(help="where run folders lie")] = Path("runs"),
        device: Annotated[str, typer.Option(help="cpu, cuda or mps")] = "cpu",
        workers: Annotated[
            int, typer.Option(min=1, help="models trained side by side (on one GPU: 1)")
        ] = os.cpu_count() or 1,
        threads: Annotated[int, typer.Option(min=1, help="CPU threads of each worker")] = 1,
        scheduler: Annotated[
            str | None,
            typer.Option(help="address of a dask scheduler with workers that see the same OUT"),
        ] = None,
        fresh: Annotated[bool, typer.Option(help="start over; set earlier results aside")] = False,
        # Its help follows from the study, which an annotation, read as text, cannot name.
        task: str = typer.Option(
            tasks[0] if tasks else "", help=f"one of {', '.join(tasks)}", hidden=not tasks
        ),
    ) -> None:
        from rich.console import Console

        console = Console()
        try:
            if task and task not in tasks:
                allowed = f"one of {', '.join(tasks)}" if tasks else "left out: there is one"
                raise ValueError(f"--task must be {allowed}, got {task!r}")
            named = presets(task) if task else presets()
            if preset not in named:
                raise ValueError(f"preset must be one of {', '.join(named)}, got {preset!r}")
            folder = run(
                override(named[preset], settings or []),
                resources=Resources(
                    root=out,
                    device=device,
                    workers=workers,
                    threads=threads,
                    scheduler=scheduler,
                    fresh=fresh,
                ),
                checkpoints=tuple(checkpoint or ()),
            )
        except (ValueError, RunError, TrainingError) as error:
            console.print(f"[red]error:[/red] {error}", highlight=False)
            raise typer.Exit(1) from error
        with xr.open_datatree(folder / "result.nc", engine="h5netcdf") as result:
            console.print(table(result))
        console.print(f"results and figures: {folder}", soft_wrap=True, highlight=False)

    main.__doc__ = question
    typer.run(main)


def _one_model(
    model: ModelConfig,
    *,
    train: Callable[..., Path] | None,
    analyse: Analyse,
    folder: Path | None,
    place: Path,
    device: str,
    threads: int,
) -> Path:
    """Train (unless its run folder is given) and analyse one model, into `place`."""
    torch.set_num_threads(threads)
    place.parent.mkdir(parents=True, exist_ok=True)
    # A worker that was given up for lost may still be at it.
    with locked(place.parent, name=f".{place.stem}.lock", wait=True):
        if not place.exists():
            if folder is None:
                assert train is not None
                folder = train(model, device=device)
            tree = analyse(model, folder, device)
            write_atomically(place, lambda to: tree.to_netcdf(to, engine="h5netcdf"))
    return place


@contextmanager
def _connected(workers: int, scheduler: str | None) -> Iterator[Client]:
    """A client of `scheduler`, or of a cluster of this machine's own with so many workers."""
    import dask.config
    from distributed import CancelledError, Client, LocalCluster

    if scheduler is not None:
        try:
            client = Client(scheduler)
        except (OSError, ValueError) as error:
            raise RunError(f"there is no dask scheduler at {scheduler!r}: {error}") from error
        try:
            with client:
                yield client
        except (CancelledError, OSError) as error:
            raise RunError(f"the dask scheduler at {scheduler!r} is gone") from error
        return
    settings = {
        # Their parents see them die; one that only keeps silent is at work, or suspended.
        "distributed.scheduler.worker-ttl": None,
        "distributed.worker.profile.enabled": False,
    }
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            memory_limit=None,
            # Another cluster may have the usual port.
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def _outcomes(client: Client, jobs: Sequence[Callable[[], Path]]) -> list[Path | Exception]:
    """The result of each job, or the error that it ended in."""
    from distributed import CancelledError, KilledWorker, wait

    outcomes: dict[int, Path | Exception] = {}
    waiting = deque(range(len(jobs)))
    running = {}
    while len(outcomes) < len(jobs):
        # One for each worker and no more: dask blames a death on all that the worker was given.
        free = len(cast(dict, client.nthreads())) - len(running)
        for _ in range(min(free, len(waiting))):
            number = waiting.popleft()
            running[client.submit(_alone, jobs[number], pure=False)] = number
        if not running:
            client.wait_for_workers(1)
            continue
        # Not for ever: meanwhile workers may have come.
        with suppress(TimeoutError):
            wait(list(running), timeout=1, return_when="FIRST_COMPLETED")
        for future in [future for future in running if future.done()]:
            number = running.pop(future)
            try:
                outcomes[number] = future.result()
            except CancelledError:
                raise
            except KilledWorker as error:
                deaths = error.allowed_failures + 1
                outcomes[number] = RunError(f"its process died {deaths} times (out of memory?)")
            except Exception as error:
                outcomes[number] = error
            # Or dask calls the job again if the worker that keeps its result dies.
            future.release()
    return [outcomes[number] for number in range(len(jobs))]


_PROCESS = threading.Lock()


def _alone(job: Callable[[], Path]) -> Path:
    """Call a job when no other is at work in this process, whose random state it uses."""
    with _PROCESS:
        return job()
