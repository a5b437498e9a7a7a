"""What papers claim, as data.

`studies/papers/AUTHOR_YEAR.toml` has a list `claims`, in our words: for each its `id`, a
`statement`, and `decided_by`, patterns of the statements of claims of our studies, by study; or
`lacks`, what is missing to decide it. Beside `decided_by`, `needs` is the data that a run needs and
the package does not have. `holds_if` says how many of the comparisons must hold: `all`,
if it is not given, `most`, or `any` of them, for what is said to be so in part. Patterns in `some`
are those of the parts of which a single comparison is enough, as of what is said of some methods.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, get_args

from studies.engine.papers import PAPERS

HoldsIf = Literal["all", "most", "any"]


@dataclass(frozen=True, kw_only=True)
class PaperClaim:
    """A claim of a paper, and the claims of our studies that decide it.

    Attributes:
        id: a short name, unique in the paper.
        statement: the claim, in our words.
        decided_by: by the name of a study, patterns of the statements of its claims.
        holds_if: whether `all` comparisons must hold, `most` or `any` of them.
        some: patterns of statements of which a single comparison must hold.
        lacks: what is missing to decide it, if no study does.
        needs: the data that the studies need and the package does not have.

    Raises:
        ValueError: both or none of `decided_by` and `lacks` are given, or `needs` without
            `decided_by`, or `holds_if` is unknown.
    """

    id: str
    statement: str
    decided_by: Mapping[str, Sequence[str]] = field(default_factory=dict)
    holds_if: HoldsIf = "all"
    some: Sequence[str] = ()
    lacks: str = ""
    needs: str = ""

    def __post_init__(self):
        if bool(self.decided_by) == bool(self.lacks):
            raise ValueError(f"claim {self.id!r} must have either decided_by or lacks")
        if self.needs and not self.decided_by:
            raise ValueError(f"claim {self.id!r} must have needs only with decided_by")
        if self.holds_if not in get_args(HoldsIf):
            raise ValueError(
                f"holds_if must be all, most or any, got {self.holds_if!r} in {self.id!r}"
            )

    def rests_on(self, study: str, statement: str) -> bool:
        """Whether a claim of a study is one of those that decide it."""
        return any(fnmatchcase(statement, pattern) for pattern in self.decided_by.get(study, ()))

    def is_of_some(self, statement: str) -> bool:
        """Whether a single comparison of a claim of a study is enough."""
        return any(fnmatchcase(statement, pattern) for pattern in self.some)


@dataclass(frozen=True)
class Claimed:
    """The claims of one paper.

    Attributes:
        citation: authors, year and title.
        claims: the claims.
    """

    citation: str
    claims: tuple[PaperClaim, ...]

    @property
    def short(self) -> str:
        """The first author and the year."""
        year = re.search(r"\b(?:19|20)\d\d\b", self.citation)
        return f"{self.citation.split(',')[0]} et al. {year[0] if year else ''}".strip()


@functools.cache
def read_claims(folder: Path = PAPERS) -> dict[str, Claimed]:
    """The claims of all papers, by the name of their table, such as `"csordas_2021"`."""
    tables = {path.stem: tomllib.loads(path.read_text()) for path in sorted(folder.glob("*.toml"))}
    return {
        name: Claimed(table["citation"], tuple(PaperClaim(**claim) for claim in table["claims"]))
        for name, table in tables.items()
    }
