"""Links of the site and the README lead somewhere; those to other sites are well formed."""

import re
from urllib.parse import urlsplit

import pytest

from tests.docs.pages import NOTEBOOKS, PAGES, ROOT, SITE, prose

FILES = [
    *PAGES,
    *NOTEBOOKS,
    *sorted((ROOT / "studies" / "results").glob("*.md")),
    *(SITE / "README.md", ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"),
]
LINK = re.compile(r"\]\(([^()\s]*(?:\([^()]*\)[^()\s]*)*)\)")
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def anchors(text):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def entries(text):
    """The documents that the toctrees of a page name."""
    for tree in TOCTREE.findall(text):
        for line in tree.splitlines():
            if line and not line.startswith(":"):
                yield re.sub(r".*<(.*)>", r"\1", line)


def wrong(link, page):
    """What is wrong with a link of a page; "" if nothing is."""
    if "//" in link or link.startswith("mailto:"):
        parts = urlsplit(link)
        return "" if parts.scheme in ("http", "https") and "." in parts.netloc else "malformed"
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return "no such file"
    if not target.is_relative_to(ROOT):
        return "outside of the repository"
    if anchor and anchor not in anchors(target.read_text()):
        return "no such heading"
    return ""


@pytest.mark.parametrize("page", FILES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text()
    if page == SITE / "gallery.md":  # a template, whose figures are those of the results pages
        text = re.sub(r"\{%.*?%\}|.*\{\{.*?\}\}.*", "", text)
    found = {link: wrong(link, page) for link in LINK.findall(prose(text))}
    assert not {link: why for link, why in found.items() if why}


def test_every_page_is_in_the_navigation():
    index = SITE / "index.md"
    named = {(SITE / f"{entry}.md").resolve() for entry in entries(index.read_text())}
    results = (ROOT / "studies" / "results").glob("*.md")
    project = {ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"}
    assert named == {*PAGES, *NOTEBOOKS, *results, *project} - {index}


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("start.md", ""),
        ("start.md#your-own-model", ""),
        ("#where-to-begin", ""),
        ("https://distributed.dask.org", ""),
        ("strat.md", "no such file"),
        ("start.md#your-model", "no such heading"),
        ("../../../README.md", "no such file"),
        ("https:/distributed.dask.org//a", "malformed"),
        ("ftp://a.b/c", "malformed"),
    ],
)
def test_wrong_links_are_found(link, why):
    assert wrong(link, SITE / "index.md") == why
