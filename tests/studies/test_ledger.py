"""The script that writes the ledger of claims."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from studies import ledger
from studies.engine import read_result
from studies.engine.results import config_of, load_tree, write_result

STORED = ledger.RESULTS / "compositional_benchmarks" / "triangles.nc"


@pytest.fixture
def folder(tmp_path):
    shutil.copy(STORED, tmp_path)
    return tmp_path


def run(folder: Path):
    app = ledger.typer.Typer()
    app.command()(ledger.main)
    return CliRunner().invoke(app, ["--results", str(folder)])


@pytest.mark.slow
def test_it_writes_the_page_and_its_data_and_leaves_results_as_they_are(folder):
    before = (folder / STORED.name).read_bytes()
    assert run(folder).exit_code == 0
    assert (folder / STORED.name).read_bytes() == before
    comparisons = load_tree(folder / ledger.DATA)["comparisons"]
    assert set(comparisons["study"].to_numpy()) == {"triangles"}
    page = (folder / ledger.PAGE).read_text()
    assert "| `triangles` " in page
    assert f"[triangles]({STORED.name})" in page
    # The data that it wrote are not taken for a result.
    assert run(folder).exit_code == 0


def test_verdicts_of_other_claims_are_made_anew(folder):
    path = folder / STORED.name
    result = read_result(path)
    verdicts = result["claims"]["verdict"].to_numpy()
    expected = verdicts.tolist()
    verdicts[:] = "not comparable"
    write_result(result, path)
    assert run(folder).exit_code == 0
    found = read_result(path)["claims"]["verdict"].to_numpy().tolist()
    assert found == expected != verdicts.tolist()


def test_last_digits_of_another_processor_are_left_as_they_are(folder):
    path = folder / STORED.name
    result = read_result(path)
    margins = result["claims"]["margin"].to_numpy()
    margins *= 1 + 1e-15
    write_result(result, path)
    before = path.read_bytes()
    assert run(folder).exit_code == 0
    assert path.read_bytes() == before
    margins *= 1.001
    write_result(result, path)
    assert run(folder).exit_code == 0
    assert read_result(path)["claims"]["margin"].to_numpy().max() < margins.max()


def test_settings_that_a_result_lacks_are_filled_in(folder):
    path = folder / STORED.name
    result = read_result(path)
    config = config_of(result)
    expected = config["setup"]["training"].pop("decay_steps")
    result.attrs["config"] = json.dumps(config)
    write_result(result, path)
    assert run(folder).exit_code == 0
    assert config_of(read_result(path))["setup"]["training"]["decay_steps"] == expected


def test_a_folder_without_results_is_an_error(tmp_path):
    outcome = run(tmp_path)
    assert outcome.exit_code == 1
    assert "results must be a folder with result files" in outcome.output


def test_a_result_of_a_study_outside_of_the_package_is_an_error(folder):
    path = folder / STORED.name
    result = read_result(path)
    result.attrs["study"] = "mine"
    write_result(result, path)
    outcome = run(folder)
    assert outcome.exit_code == 1
    assert "got 'mine'" in " ".join(outcome.output.split())
