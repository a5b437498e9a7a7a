"""Opening of stored data sets, from a folder, Hugging Face's cache or its hub."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

_HUB_SECONDS = 5


class Table(Protocol):
    """One split: `datasets.Dataset` or `datasets.IterableDataset`."""

    @property
    def features(self) -> Any:
        """The type of each column, None if unknown."""
        ...

    def select_columns(self, column_names: str) -> "Table":
        """Return the same rows with one column."""
        ...

    def cast_column(self, column: str, feature: Any) -> "Table":
        """Return the same rows with a column of another type."""
        ...

    def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]:
        """Yield the rows in groups, as a list per column."""
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
    """Open a data set; files in a folder are not copied.

    Args:
        name: the data set's name in errors.
        folder: the output of `save_to_disk`, parquet files, or images as SPLIT/CLASS/FILE; None:
            Hugging Face's cache or, if it is not there and the hub responds, the hub.
        setting: the name of the setting for the folder, in errors.
        place: the path of the data set below FOLDER, in errors.
        hub: the data set's name on the hub, None if it is not there.
        subset: the name of the subset on the hub.

    Returns:
        The splits by name.

    Raises:
        FileNotFoundError: the data set is missing; says what to fetch and where to put it.
    """
    import datasets  # imported here, since it takes a second or two

    if folder is not None:
        if (folder / "dataset_dict.json").is_file():
            return cast(Mapping[str, Table], datasets.load_from_disk(str(folder)))
        if folder.is_dir() and any(folder.iterdir()):
            return _open_files(name, folder)
    elif hub is not None:
        if (cached := _open_cached(hub, subset)) is not None:
            return cached
        if _hub_responds():
            return cast(Mapping[str, Table], datasets.load_dataset(hub, subset))
    raise FileNotFoundError(_how_to_get(name, folder, setting, place, hub, subset))


def how_to_fetch(hub: str, subset: str | None, target: str) -> str:
    """Return the command that saves a data set of the hub to a folder, for errors."""
    arguments = ", ".join(repr(argument) for argument in (hub, subset) if argument)
    return (
        "where there is a network, run\n"
        f"    import datasets; datasets.load_dataset({arguments}).save_to_disk({target!r})\n"
    )


def require_splits(name: str, tables: Mapping[str, Table], splits: Iterable[str]) -> None:
    """Raise a ValueError unless a data set has all the given splits."""
    if missing := [split for split in splits if split not in tables]:
        raise ValueError(
            f"{name} must have the splits {', '.join(missing)}, got {', '.join(tables)}"
        )


def _open_files(name: str, folder: Path) -> Mapping[str, Table]:
    import datasets

    try:
        # A stream reads the files in place; otherwise they would be copied into the cache.
        return cast(Mapping[str, Table], datasets.load_dataset(str(folder), streaming=True))
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"{folder} must have the output of save_to_disk of a DatasetDict, parquet files, or "
            f"images as SPLIT/CLASS/FILE, got other files for {name}: {error}"
        ) from error


def _open_cached(hub: str, subset: str | None) -> Mapping[str, Table] | None:
    """Return a data set that was loaded from the hub before, or None; needs no network.

    `datasets.load_dataset` itself looks into its cache only when the hub has failed five times.
    """
    from datasets.packaged_modules.cache.cache import Cache

    try:
        cached = Cache(
            repo_id=hub,
            dataset_name=hub.split("/")[-1],
            config_name=subset,
            version="auto",
            hash="auto",
        )
    except (ValueError, OSError):
        return None
    return cast(Mapping[str, Table], cached.as_dataset())


def _hub_responds() -> bool:
    """Return whether the hub can be reached, by one quick request."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception:  # of any HTTP library, or of the offline mode
        return False
    return True


def _how_to_get(
    name: str, folder: Path | None, setting: str, place: str, hub: str | None, subset: str | None
) -> str:
    if hub is None:
        return (
            f"there is no {name} in {folder}: put there the output of `save_to_disk` of a "
            "`datasets.DatasetDict`, parquet files, or images as SPLIT/CLASS/FILE"
        )
    if folder is None:
        return (
            f"there is no {name} in Hugging Face's cache, and its hub does not respond: "
            f"{how_to_fetch(hub, subset, place)}"
            f"and, if that is another machine, copy FOLDER here, and set {setting} to it"
        )
    return (
        f"there is no {name} in {folder}: {how_to_fetch(hub, subset, str(folder))}"
        "and, if that is another machine, copy the folder to the same place here"
    )
