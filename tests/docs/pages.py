"""The pages of the site, and what is in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs"
NOTEBOOKS = sorted((SITE / "notebooks").glob("*.md"))
PAGES = sorted(
    set(SITE.rglob("*.md")) - {SITE / "README.md", *NOTEBOOKS, *SITE.glob("_build/**/*")}
)

FENCE = re.compile(r"^(`{3,}|:{3,})([^\n]*)\n(.*?)^\1[ ]*$\n?", flags=re.DOTALL | re.MULTILINE)


def blocks(text: str, language: str = "python") -> list[str]:
    """The blocks of code in a language, in order."""
    return [code for _, kind, code in FENCE.findall(text) if kind.strip() == language]


def prose(text: str) -> str:
    """The text without blocks of code and code in lines."""
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.M))
