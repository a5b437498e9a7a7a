"""The README's Python blocks run as they stand, in one session, in a fresh folder."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from mechanisms import model_zoo
from studies.engine import Resources, read_result, run, zoo
from studies.raven_latent_code import STUDY

README = Path(__file__).parents[1] / "README.md"
NAMED = ["raven-hyla-k2-long-seed2"]
"""The models of the zoo that it loads."""


def test_the_blocks_run(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    # One is a file of its own, and run as such.
    blocks = [block for block in blocks if "main(STUDY)" not in block]
    assert len(blocks) == 12
    monkeypatch.chdir(tmp_path)
    # In place of the model of this name that is trained for longer; figures of it are not needed.
    study = replace(STUDY, views={})
    changes = ["model=hyla", "seed=2", "training.n_steps=10", "decoding.n=60"]
    made = run(study, "smoke", changes, resources=Resources(root=Path("runs")))
    monkeypatch.setattr(model_zoo, "FOLDER", tmp_path / "zoo")
    assert zoo.add(made, study, "raven-{model}-k{task.n_features}-long-seed{seed}") == NAMED
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
    of_encoder = names["of_encoder"]["score"].sel(split="test", metric="accuracy")
    assert (of_encoder.sel(control="probe") > 0.9).all()
    assert (of_encoder.sel(control="shuffled") < 0.7).all()
    for block in blocks:
        assert len([line for line in block.splitlines() if line]) <= 60
    assert names["columns"].sizes["step"] == 8
    assert {"left neighbour", "right neighbour"} < set(names["of_loop"]["control"].to_numpy())
    f1 = names["of_loop"]["score"].sel(metric="f1")
    assert f1.sel(control="trained") > f1.sel(control="left neighbour")
    specialized = names["experts"]["specialization"].sel(layer="pooled")
    assert specialized.sel(control="observed") > specialized.sel(control="shuffled")
    above = names["found"]["above_low"].sel(site="embedding, token 0", variable="polarity 0")
    assert (above.sel(control=["none", "random", "another variable"]) > 0).all()
    for picture in ("looped.png", "experts.png", "aligned.png"):
        assert (tmp_path / picture).stat().st_size > 5000
    assert names["last"].attrs["batches"] == 4
    assert (names["decoded"]["score"].sel(control="probe", metric="accuracy") > 0.9).all()
    assert (names["decoded"]["score"].sel(control="shuffled", metric="accuracy") < 0.3).all()
    assert (names["used"]["effect_high"].sel(outcome="right") < -0.2).all()
    assert names["signs"].sizes["kind"] == 5
    assert (names["best"]["best_loss"] < names["best"]["routed_loss"]).any()


def test_a_study_of_ones_own_runs_from_a_folder_of_its_own(tmp_path):
    (block,) = re.findall(
        r"```python\n(\"\"\"(?:(?!```).)*main\(STUDY\)\n)```", README.read_text(), re.S
    )
    assert len([line for line in block.splitlines() if line]) <= 50
    (tmp_path / "my_study.py").write_text(block)
    words = [
        "--workers",
        "1",
        "training.n_steps=20",
        "training.evaluate_every=10",
        "n_validation=50",
    ]
    done = subprocess.run(
        [sys.executable, "my_study.py", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(README.parent)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy, ood" in done.stdout
    (path,) = tmp_path.glob("runs/counting-*/result.nc")
    result = read_result(path)
    assert result["weights"]["weight"].dims == ("cell", "token")
    assert "my_study.py" in json.loads(result.attrs["code"])["measures"]["weights"]


def test_the_models_that_it_names_exist():
    assert set(re.findall(r"\"(\w+-[\w-]+-seed\d+)\"", README.read_text())) == set(NAMED)
    if shipped := model_zoo.records():
        assert set(NAMED) <= set(shipped)


def test_the_paths_that_it_names_exist():
    text = README.read_text()
    for path in re.findall(r"\]\(([\w./]+)\)", text):
        assert (README.parent / path).exists(), path
    tree = re.search(r"    mechanisms/.*?\n\n", text, flags=re.DOTALL).group()
    package = ""
    for line in tree.splitlines():
        if match := re.match(r"    (\w+)/", line):
            package = match.group(1)
        for name in re.findall(r"\w+\.py", line):
            assert (README.parent / package / name).exists(), f"{package}/{name}"
    for package in ("mechanisms", "tasks", "probes"):
        for path in (README.parent / package).glob("*/__init__.py"):
            folder = path.parent.name
            assert f" {folder}/ " in tree, f"{package}/{folder}"
