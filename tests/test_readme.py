"""The README's Python blocks run as they stand, in one session, in a fresh folder."""

import re

from mechanisms import model_zoo
from tests.docs.pages import ROOT, blocks

README = ROOT / "README.md"


def test_the_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    snippets = blocks(README.read_text())
    assert len(snippets) == 5
    for block in snippets:
        exec(block, names)
    decoded = names["decoded"]["score"].sel(split="test", metric="accuracy", layer="all")
    assert decoded.sel(control="probe") > 0.9
    assert decoded.sel(control="shuffled") < 0.7
    rules = names["scores"]
    assert set(rules["model"].to_numpy()) == {"hyla", "softmax", "linear"}
    assert names["changed"].abs().max() > 0


def test_it_is_short():
    assert len(README.read_text().splitlines()) <= 150


def test_the_models_that_it_names_exist():
    named = set(re.findall(r"\"(\w+-[\w-]+-seed\d+)\"", README.read_text()))
    assert named
    if shipped := model_zoo.records():
        assert named <= set(shipped)


def test_the_tree_of_the_architecture_names_what_is_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    tree = re.search(r"    mechanisms/.*?\n\n", text, flags=re.DOTALL).group()
    package = ""
    for line in tree.splitlines():
        if match := re.match(r"    (\w+)/", line):
            package = match.group(1)
        for name in re.findall(r"\w+\.py", line):
            assert (ROOT / package / name).exists(), f"{package}/{name}"
    for package in ("mechanisms", "tasks", "probes"):
        for path in (ROOT / package).glob("*/__init__.py"):
            folder = path.parent.name
            assert f" {folder}/ " in tree, f"{package}/{folder}"
