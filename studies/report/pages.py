"""Result pages: templates whose numbers, tables and verdicts come from result files.

A template is Markdown with expressions of Jinja2, in which

- `{{ table() }}` is the table of the study, as it was printed, and `{{ claims() }}` its claims with
  their verdicts, folded;
- `{{ cells("scores/accuracy", model="softmax", split="ood", group="all").percent }}` is a number
  for each trained model, of a variable at chosen labels; see `Numbers` for what they can say;
- `{{ setting("training.n_steps") }}` is a setting that all models share;
- `{{ machine_time() }}` is the time that all models trained, together;
- `{{ verdict("HYLA answers*") }}` is the verdict on a claim of the study, and `{{ effect(...) }}`
  the difference that decides it, with its interval;
- `{{ n_claims("holds") }}` is the number of the papers' claims with a verdict, in the ledger, and
  `{{ list_claims("holds", "tay_2019") }}` are those of a paper;
- all take `file="triangles.nc"`, where a page is about several result files.

What is left as text has no numbers and verdicts of its own: `loose_words` finds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from io import StringIO
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float
from jinja2 import Environment, StrictUndefined
from rich.console import RenderableType

from studies.engine.claims import NOT_RUN, VERDICTS
from studies.engine.readings import varied
from studies.engine.results import config_of
from studies.engine.study import Study
from studies.report.ledger import difference
from studies.report.table import count, plain_console, short
from studies.report.verdicts import render_claims, render_fairness

WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LITERAL = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?%?|(?<!\w)\.\d+")
"""A number in text."""
ALLOWED = re.compile(r"(?:19|20)\d\d|\d")
"""Numbers that text may have: years, and digits, as in K = 2 or Table 6."""
EXPRESSION = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
NOT_PROSE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)
VERDICT = re.compile("|".join(rf"\b{name}\b" for name in VERDICTS))


@dataclass(frozen=True)
class Numbers:
    """A number for each of several models, and what can be said of them in a sentence.

    Args:
        values: the numbers.
        text: function that formats one of them.

    Example:
        In a template: `{{ cells(...).percent.range }}%` is "53 to 56%".
    """

    values: Float[np.ndarray, " model"]
    text: Callable[[float], str] = short

    @property
    def percent(self) -> Numbers:
        """The same in percent, without decimals."""
        return Numbers(100 * self.values, lambda value: f"{value:.0f}")

    def decimals(self, number: int) -> Numbers:
        """The same with a fixed number of decimals."""
        return replace(self, text=lambda value: f"{value:.{number}f}".removeprefix("0"))

    @property
    def whole(self) -> Numbers:
        """The same as whole numbers with separators of thousands."""
        return replace(self, text=count)

    def __str__(self) -> str:
        return self.text(float(self.values.mean()))

    @property
    def range(self) -> str:
        """The least and the greatest: "53 to 56", or a single number if both read the same."""
        ends = [self.text(float(end)) for end in (self.values.min(), self.values.max())]
        return " to ".join(dict.fromkeys(ends))

    @property
    def median(self) -> str:
        """The median, where a few models are far from the others."""
        return self.text(float(np.median(self.values)))

    @property
    def each(self) -> str:
        """All of them: "53, 56 and 54"."""
        *first, last = map(self.text, self.values.tolist())
        return f"{', '.join(first)} and {last}" if first else last

    @property
    def n(self) -> str:
        """How many there are, in words below ten."""
        return _in_words(len(self.values))

    def above(self, other: float) -> str:
        """How many are greater than a number, in words."""
        return _in_words(int((self.values > other).sum()))

    def below(self, other: float) -> str:
        """How many are less than a number, in words."""
        return _in_words(int((self.values < other).sum()))


def _in_words(number: int) -> str:
    return WORDS[number] if number < len(WORDS) else count(number)


def render_page(
    template: str,
    results: Mapping[str, xr.DataTree],
    studies: Mapping[str, Study],
    width: int,
) -> str:
    """A page from its template.

    Args:
        template: the text of the template.
        results: results by the name of their file; the first is the default.
        studies: studies by name.
        width: columns of text that a table may have.

    Raises:
        ValueError: no models, or no claims, are as the template says.
        KeyError: a result has no such variable or setting.
        jinja2.TemplateError: the template is malformed, or uses an unknown name.
    """
    default = next(iter(results))

    def of_file(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, file: str = default, **kwargs: Any) -> Any:
            return function(results[file], *args, **kwargs)

        return call

    names = {
        "cells": of_file(cells),
        "setting": of_file(setting),
        "machine_time": of_file(machine_time),
        "verdict": of_file(verdict),
        "effect": of_file(effect),
        "n_claims": of_file(n_claims),
        "list_claims": of_file(list_claims),
        "table": of_file(partial(_table, studies, width)),
        "claims": of_file(partial(_claims, width)),
    }
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(template).render(names)


def cells(result: xr.DataTree, path: str, mean: Sequence[str] = (), **labels: Any) -> Numbers:
    """The values of a variable in the models with the chosen tuned settings.

    Args:
        result: a result.
        path: group and variable, such as `"scores/accuracy"`.
        mean: dims over which a mean is taken.
        labels: values of axes, which select models, and labels of all other dims; `"*"` are all
            values of an axis.

    Raises:
        KeyError: there is no such variable or label.
        ValueError: a dim is left over, no model has the values, or an axis by which they differ is
            not named, so that a sentence would speak of more models than it says.
    """
    group, _, name = path.rpartition("/")
    data = result[group].to_dataset()
    axes = {name for name, values in data.coords.items() if values.dims == ("cell",)}
    of_models = {key: label for key, label in labels.items() if key in axes}
    values = data[name].sel({k: v for k, v in labels.items() if k not in of_models})
    values = values.mean(mean) if mean else values
    if values.dims != ("cell",):
        left = ", ".join(str(dim) for dim in values.dims if dim != "cell")
        raise ValueError(f"labels must also have {left} for {path}, got {', '.join(labels)}")
    keep = ((data["chosen"] == 1) & np.isfinite(values)).to_numpy()
    for key, label in of_models.items():
        keep &= label == "*" or (data[key] == label).to_numpy()
    values = values[keep]
    if not values.size:
        raise ValueError(f"{path} has no value for a model with {labels}")
    for axis in (name for name in varied(result) if name not in labels):
        several = np.unique(values[axis])
        if len(several) > 1 and len(np.unique(values)) > 1:
            raise ValueError(
                f"labels must also have {axis} for {path}, one of "
                f"{', '.join(map(str, several))}, or '*' for all; got {labels}"
            )
    return Numbers(values.to_numpy())


def setting(result: xr.DataTree, path: str) -> str:
    """A setting that all models share, as text: whole numbers with separators of thousands.

    Args:
        result: a result.
        path: names of nested settings and positions in lists, as in `task.ood_depths.1`.

    Raises:
        ValueError: models differ in it.
    """
    config, parts = config_of(result), path.split(".")
    value = _part(config["setup"], parts)
    # An axis may also be a list or an object that holds the setting.
    holders = {".".join(parts[:end]): parts[end:] for end in range(1, len(parts) + 1)}
    for grid in config["grids"]:
        own = holders.keys() & grid.keys()
        others = [_part(other, holders[name]) for name in own for other in grid[name]]
        for axis, table in config["where"].items() if not own else ():
            keys = map(str, grid.get(axis, [_part(config["setup"], axis.split("."))]))
            implied = [table.get(key, {}) for key in keys]
            others += [
                _part(one[name], holders[name])
                for one in implied
                for name in holders
                if name in one
            ]
        if any(other != value for other in others):
            raise ValueError(
                f"a setting on a page must be one of all models, got {path} of "
                f"{result.attrs['study']}: {', '.join(map(str, dict.fromkeys([value, *others])))}"
            )
    return count(value) if isinstance(value, int) else str(value)


def _part(value: Any, path: Sequence[str]) -> Any:
    """The part of a nested value at names, or at positions of lists."""
    for name in path:
        value = value[int(name) if isinstance(value, list) else name]
    return value


def machine_time(result: xr.DataTree) -> str:
    """The time that all models of a result trained, one after the other: "40 minutes"."""
    training = result["training"].to_dataset()
    minutes = training["seconds"].max("train_step").sum().item() / 60
    return f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"


def verdict(result: xr.DataTree, pattern: str, context: str = "*") -> str:
    """The verdict on a claim of a study, or the verdicts, if its comparisons differ.

    Args:
        result: a result.
        pattern: pattern of the statement.
        context: pattern of what else varies.

    Raises:
        ValueError: there is no such claim.
    """
    verdicts = [row.verdict for row in _comparisons(result, pattern, context)]
    return " or ".join(name for name in VERDICTS if name in verdicts)


def effect(result: xr.DataTree, pattern: str, context: str = "*") -> str:
    """The difference that decides a claim of a study, its interval, the models: ".1 [.05; .2] (5)".

    Args:
        result: a result.
        pattern: pattern of the statement.
        context: pattern of what else varies.

    Raises:
        ValueError: not one comparison is like that.
    """
    found = _comparisons(result, pattern, context)
    if len(found) > 1:
        of = "; ".join(f"{row.statement} ({row.context})" for row in found)
        raise ValueError(f"pattern and context must be those of one comparison, got {of}")
    return f"{difference(found[0])} ({found[0].n_pairs:.0f})"


def _comparisons(result: xr.DataTree, pattern: str, context: str) -> list[Any]:
    """The comparisons of a claim of a study, of which there must be one."""
    claims = result["claims"].to_dataset().to_dataframe()
    found = [
        row
        for _, row in claims.iterrows()
        if fnmatchcase(str(row.statement), pattern) and fnmatchcase(str(row.context), context)
    ]
    if not found:
        raise ValueError(f"no claim is like {pattern!r} with {context!r}")
    return found


def n_claims(
    ledger: xr.DataTree,
    verdict: str | None = None,
    paper: str | None = None,
    *,
    over_files: bool = False,
) -> int:
    """How many claims of papers a ledger has, of all or with a verdict, of all papers or of one.

    Args:
        over_files: count verdicts that are corrected over all files of a study.

    Raises:
        ValueError: there is no such verdict or paper.
    """
    column = "verdict_over_files" if over_files else "verdict"
    return len(_claims_of_papers(ledger, verdict, paper, column))


def list_claims(ledger: xr.DataTree, verdict: str, paper: str) -> str:
    """The claims of a paper with a verdict, in italics, in one line.

    Raises:
        ValueError: there is no such verdict or paper.
    """
    found = _claims_of_papers(ledger, verdict, paper)
    return "; ".join(f"*{claim}*" for claim in found.claimed) or "none"


def _claims_of_papers(
    ledger: xr.DataTree, verdict: str | None, paper: str | None, verdicts: str = "verdict"
) -> pd.DataFrame:
    """The claims of a ledger with a verdict, in the column of that name, of a paper."""
    # The types of pandas do not know what a selection by a mask is.
    found: Any = ledger["claims"].to_dataset().to_dataframe()
    for name, column, wanted, known in (
        ("verdict", verdicts, verdict, VERDICTS),
        ("paper", "paper", paper, tuple(dict.fromkeys(found.get("paper", ())))),
    ):
        if wanted is not None and wanted not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {wanted!r}")
        if wanted is not None:
            found = found[found[column] == wanted]
    return found


def _table(studies: Mapping[str, Study], width: int, result: xr.DataTree) -> str:
    """The table of a study with its caption, in a block of text."""
    return _block(studies[result.attrs["study"]].table.render(result), width)


def _claims(width: int, result: xr.DataTree) -> str:
    """The claims of a result with their verdicts, and notes on its conditions, folded.

    Only the notes if no claim was run.
    """
    notes = "\n".join(f"- {note}" for note in render_fairness(result))
    if (table := render_claims(result)) is None:
        return notes
    verdicts = [one for one in result["claims"]["verdict"].to_numpy() if one != NOT_RUN]
    counts = ", ".join(f"{name}: {verdicts.count(name)}" for name in VERDICTS if name in verdicts)
    summary = f"<details><summary>Verdicts on {len(verdicts)} comparisons ({counts})</summary>"
    parts = (summary, _block(table, width), notes, "</details>")
    return "\n\n".join(filter(None, parts))


def _block(shown: RenderableType, width: int) -> str:
    """A printed table as a block of text."""
    stream = StringIO()
    plain_console(width=width, file=stream).print(shown)
    lines = [line.rstrip() for line in stream.getvalue().strip("\n").splitlines()]
    return "\n".join(("```text", *lines, "```"))


def loose_words(template: str) -> Sequence[str]:
    """The numbers and verdicts in the text of a template, which come from no result file."""
    text = EXPRESSION.sub(" ", template)
    numbers = (match.group().rstrip(",") for match in LITERAL.finditer(NOT_PROSE.sub(" ", text)))
    verdicts = [match.group() for match in VERDICT.finditer(text)]
    return [number for number in numbers if not ALLOWED.fullmatch(number)] + verdicts
