"""The Python blocks of a page of the site run as they stand, in one session, in a fresh folder."""

import json
import os
import subprocess
import sys

import pytest

from studies.cli import check_object
from studies.engine import read_result
from tests.docs.pages import PAGES, ROOT, SITE, blocks

LONGEST = 60
"""Lines of a block."""
OWN_STUDY = "howto/study.md"
"""Its block is a file of its own, and run as such."""


def name_of(page):
    return str(page.relative_to(SITE))


def scored(data, **labels):
    return data["score"].sel(metric="accuracy", **labels)


def check_start(names):
    encoder = scored(names["of_encoder"], split="test")
    assert (encoder.sel(control="probe") > 0.9).all()
    assert (encoder.sel(control="shuffled") < 0.7).all()
    rules = scored(names["scores"], split="id", layer="all")
    assert rules.sel(control="probe") > 0.5 > 0.3 > rules.sel(control="shuffled")
    assert names["changed"].abs().max() > 0


def check_model(names):
    assert names["columns"].sizes["step"] == 8
    assert {"left neighbour", "right neighbour"} < set(names["of_loop"]["control"].to_numpy())
    f1 = names["of_loop"]["score"].sel(metric="f1")
    assert f1.sel(control="trained") > f1.sel(control="left neighbour")
    specialized = names["experts"]["specialization"].sel(layer="pooled")
    assert specialized.sel(control="observed") > specialized.sel(control="shuffled")
    assert names["last"].attrs["batches"] == 4
    assert (scored(names["decoded"], control="probe") > 0.9).all()
    assert (scored(names["decoded"], control="shuffled") < 0.3).all()
    assert (names["used"]["effect_high"].sel(outcome="right").isel(site=-1) < -0.2).all()


def check_task(names):
    above = names["found"]["above_low"].sel(site="embedding, token 0", variable="polarity 0")
    assert (above.sel(control=["none", "random", "another variable"]) > 0).all()


def check_probe(names):
    assert (names["scores"]["entropy"] > 0.9).all()  # the model is untrained


def check_control_flow(names):
    assert len(names["graphs"]["edge"]) > 100


def check_oracle(names):
    assert (names["best"]["best_loss"] < names["best"]["routed_loss"]).any()
    loss = names["scores"]["loss"].sel(control="untrained")
    assert loss.sel(path="sample") < loss.sel(path="task")


def check_pairing(names):
    assert (names["forced"]["removed"].sel(condition=["true", "random"]) < 1).all()


def check_signs(names):
    assert names["signs"].sizes["kind"] == 5


def check_paper(names):
    assert names["table"].shape == (3, 2)


CHECKS = {
    "start.md": check_start,
    "howto/model.md": check_model,
    "howto/task.md": check_task,
    "howto/probe.md": check_probe,
    "howto/paper.md": check_paper,
    "concepts/control_flow.md": check_control_flow,
    "concepts/oracle.md": check_oracle,
    "concepts/pairing.md": check_pairing,
    "concepts/signed_attention.md": check_signs,
}
FIGURES = {
    "howto/model.md": ("looped.png", "experts.png"),
    "howto/task.md": ("aligned.png",),
    "howto/probe.md": ("entropy.png",),
    "howto/paper.md": ("accuracy.pdf",),
}
RUNNABLE = [page for page in PAGES if blocks(page.read_text()) and name_of(page) != OWN_STUDY]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_the_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Classes are checked in other processes, which import their module.
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page.read_text()):
        assert len([line for line in block.splitlines() if line]) <= LONGEST
        exec(block, names)
    CHECKS.get(name_of(page), lambda _: None)(names)
    for figure in FIGURES.get(name_of(page), ()):
        assert (tmp_path / figure).stat().st_size > 5000


def test_the_pages_that_are_checked_exist():
    assert {*CHECKS, *FIGURES} <= set(map(name_of, RUNNABLE))


@pytest.mark.slow
def test_a_study_of_ones_own_runs_from_a_folder_of_its_own(tmp_path, monkeypatch):
    (block,) = blocks((SITE / OWN_STUDY).read_text())
    assert len([line for line in block.splitlines() if line]) <= 50
    (tmp_path / "my_study.py").write_text(block)
    short = ["training.n_steps=20", "training.evaluate_every=10", "n_validation=50"]
    done = subprocess.run(
        [sys.executable, "my_study.py", "--workers", "1", *short],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy, ood" in done.stdout
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    check_object("my_study.py:STUDY", None)
    (path,) = tmp_path.glob("runs/counting-*/result.nc")
    result = read_result(path)
    assert result["weights"]["weight"].dims == ("cell", "token")
    assert "my_study.py" in json.loads(result.attrs["code"])["measures"]["weights"]
