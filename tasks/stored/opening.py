"""Data sets that others made: opened from a folder, from Hugging Face's cache or from its hub."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

_HUB_SECONDS = 5


class Table(Protocol):
    """One split: `datasets.Dataset` or `datasets.IterableDataset`."""

    @property
    def features(self) -> Any:
        """The type of each column, None if nobody knows."""
        ...

    def select_columns(self, column_names: str) -> "Table":
        """Return the same rows with one column."""
        ...

    def cast_column(self, column: str, feature: Any) -> "Table":
        """Return the same rows with a column of another type."""
        ...

    def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]:
        """Return the rows in groups, each a list per column."""
        ...


def open_stored(
    name: str,
    *,
    folder: Path | None,
    setting: str,
    place: str,
    hub: str | None,
    subset: str | None,
) -> Mapping[str, Table]:
    """Open a data set, without a copy of what lies in a folder.

    Args:
        name: what the data set is called in errors.
        folder: what `save_to_disk` wrote, or parquet files, or images as SPLIT/CLASS/FILE; None:
            Hugging Face's cache or, if it is not there and the hub answers, the hub.
        setting: what the user sets to read from FOLDER, for errors.
        place: where in FOLDER the data set would be, for errors.
        hub: the data set's name on the hub, None if it is not known there.
        subset: which part of it.

    Returns:
        The splits by name.

    Raises:
        FileNotFoundError: it is nowhere; says what to fetch and where to put it.
    """
    import datasets  # takes a second or two, which only those pay who read such data

    if folder is not None:
        if (folder / "dataset_dict.json").is_file():
            return cast(Mapping[str, Table], datasets.load_from_disk(str(folder)))
        if folder.is_dir() and any(folder.iterdir()):
            return _open_files(name, folder)
    elif hub is not None:
        if (cached := _open_cached(hub, subset)) is not None:
            return cached
        if _hub_answers():
            return cast(Mapping[str, Table], datasets.load_dataset(hub, subset))
    raise FileNotFoundError(_how_to_get(name, folder, setting, place, hub, subset))


def how_to_fetch(hub: str, subset: str | None, target: str) -> str:
    """Return what to run to have a data set of the hub in a folder."""
    arguments = ", ".join(repr(one) for one in (hub, subset) if one)
    return (
        "where there is a network, run\n"
        f"    import datasets; datasets.load_dataset({arguments}).save_to_disk({target!r})\n"
    )


def require_splits(name: str, found: Mapping[str, Table], wanted: Iterable[str]) -> None:
    """Raise a ValueError unless a data set has all the splits that are wanted."""
    if missing := [split for split in wanted if split not in found]:
        raise ValueError(f"{name} has the splits {', '.join(found)}: {', '.join(missing)} lacks")


def _open_files(name: str, folder: Path) -> Mapping[str, Table]:
    import datasets

    try:
        # As a stream, it is read where it lies; otherwise it would be copied into the cache.
        return cast(Mapping[str, Table], datasets.load_dataset(str(folder), streaming=True))
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"{folder}: allowed is what save_to_disk of a DatasetDict wrote, parquet files, or "
            f"images as SPLIT/CLASS/FILE, for {name}: {error}"
        ) from error


def _open_cached(hub: str, subset: str | None) -> Mapping[str, Table] | None:
    """Return what was once loaded from the hub, or None; never asks the network.

    `datasets.load_dataset` itself looks into its cache only when the hub has failed five times.
    """
    from datasets.packaged_modules.cache.cache import Cache

    try:
        stored = Cache(
            repo_id=hub,
            dataset_name=hub.split("/")[-1],
            config_name=subset,
            version="auto",
            hash="auto",
        )
    except (ValueError, OSError):
        return None
    return cast(Mapping[str, Table], stored.as_dataset())


def _hub_answers() -> bool:
    """Return whether the hub can be reached: one quick request, so that nobody waits for many."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception:  # of whichever HTTP library it is made with, or that it is told to be offline
        return False
    return True


def _how_to_get(
    name: str, folder: Path | None, setting: str, place: str, hub: str | None, subset: str | None
) -> str:
    if hub is None:
        return (
            f"there is no {name} in {folder}: put there what `save_to_disk` of a "
            "`datasets.DatasetDict` writes, parquet files, or images as SPLIT/CLASS/FILE"
        )
    if folder is None:
        return (
            f"there is no {name} in Hugging Face's cache, and its hub does not answer: "
            f"{how_to_fetch(hub, subset, place)}"
            f"and, if that is another machine, copy FOLDER here, and set {setting} to it"
        )
    return (
        f"there is no {name} in {folder}: {how_to_fetch(hub, subset, str(folder))}"
        "and, if that is another machine, copy the folder to the same place here"
    )
