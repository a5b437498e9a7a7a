"""Studies: a task, mechanisms and probes put together to answer a question."""

from importlib.machinery import PathFinder
from pathlib import Path


def check_shadows() -> None:
    """See that the packages beside this one are those that `import` finds.

    Their names are common ones: a file `tasks.py` beside a script comes before the package.

    Raises:
        ImportError: a module or package of the same name comes before one of them.
    """
    here = Path(__file__).resolve().parents[1]
    for name in ("mechanisms", "tasks", "probes"):
        # A package that is not on the path is found by its installation, after all that is.
        found = PathFinder.find_spec(name)
        origin = found and found.origin
        if origin and Path(origin).resolve() != here / name / "__init__.py":
            raise ImportError(
                f"{origin} comes before modscope's package {name!r} and has its name: "
                "rename it, or run from another folder"
            )


check_shadows()
