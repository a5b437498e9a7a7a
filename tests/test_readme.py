"""The README's Python blocks run as they stand, in one session, in a fresh folder."""

import re
from pathlib import Path

from studies.raven_latent_code import presets, run
from studies.running import Resources
from studies.settings import override

README = Path(__file__).parents[1] / "README.md"


def test_the_blocks_run(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 7
    monkeypatch.chdir(tmp_path)
    study = override(presets()["smoke"], ["mechanisms=hyla", "training.n_steps=10", "n_decode=60"])
    run(study, resources=Resources(root=Path("runs")))
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    printed = capsys.readouterr().out
    assert "layer" in printed
    assert "ood_unpermuted" in printed
    assert names["changed"].abs().max() > 0
    assert "DiGraph with" in printed
    assert len(names["graphs"]["edge"]) > 100
    assert (names["forced"]["removed"].sel(condition=["true", "random"]) < 1).all()
    assert names["signs"].sizes["kind"] == 5
    assert (names["best"]["best_loss"] < names["best"]["routed_loss"]).any()


def test_the_paths_that_it_names_exist():
    text = README.read_text()
    for path in re.findall(r"\]\(([\w./]+)\)", text):
        assert (README.parent / path).exists(), path
    tree = re.search(r"    mechanisms/.*?\n\n", text, flags=re.DOTALL).group()
    folder = ""
    for line in tree.splitlines():
        if match := re.match(r"    (\w+)/", line):
            folder = match.group(1)
        for name in re.findall(r"\w+\.py", line):
            assert (README.parent / folder / name).exists(), f"{folder}/{name}"
