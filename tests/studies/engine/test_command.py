import importlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import typer
from rich.console import Console
from rich.table import Table as RichTable

from studies import coda_composition
from studies.engine import Claim, Preset, Row, Section, Study, Table, metric
from studies.engine.command import FILE_WIDTH, exit_on, width_of
from tests.studies.command_line import command_line
from tests.studies.engine.toy import TOY, ToySetup

ROOT = Path(__file__).parents[3]
FILES = sorted(
    path.stem for path in (ROOT / "studies").glob("[a-z]*.py") if "engine.main(" in path.read_text()
)
SCRIPTS = [*FILES, "ledger", "paper_gpu", "zoo"]


def test_there_are_eleven_files_of_studies():
    assert len(FILES) == 11


def test_help_imports_no_heavy_libraries():
    script = f"""
import runpy, sys
for name in {SCRIPTS}:
    sys.argv = ["study", "--help"]
    try:
        runpy.run_path(f"studies/{{name}}.py", run_name="__main__")
    except SystemExit:
        pass
    heavy = {{"transformer_lens", "dask", "distributed", "sklearn"}} & set(sys.modules)
    assert not heavy, (name, heavy)
"""
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    for word in ("--preset", "--show", "--measure", "--redraw", "--fresh", "--accept-code"):
        assert process.stdout.count(word) >= len(FILES)


def test_one_of_several_studies_is_chosen_by_name(tmp_path):
    studies = coda_composition.ARITHMETIC, coda_composition.SIGNED_PAIRS
    arguments = ["--show", "--preset", "smoke", "--out", str(tmp_path)]
    for study in studies:
        status, output = command_line(*studies, words=[*arguments, "--study", study.name])
        assert status == 0
        assert f"folder: {tmp_path}/{study.name}-" in output
    status, output = command_line(*studies, words=[*arguments, "--study", "mlu"])
    assert status == 1
    message = "--study must be one of coda_arithmetic, coda_signed_pairs, got 'mlu'"
    assert message in " ".join(output.split())


def test_a_study_that_only_the_script_defines_is_refused(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "from studies.engine import main\n"
        "from tests.studies.engine.toy import TOY, ToySetup\n"
        "from dataclasses import replace\n"
        'if __name__ == "__main__":\n'
        '    STUDY = replace(TOY, name="mine")\n'
        "    main(STUDY)\n"
    )
    command = [sys.executable, str(script), "--show"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert process.returncode == 1
    message = "STUDY must be defined at the top level of mine.py, outside of `if __name__"
    assert message in " ".join(process.stderr.split())


def test_a_file_that_workers_cannot_import_is_refused(tmp_path):
    script = tmp_path / "mine.v2.py"
    script.write_text(
        "from studies.engine import main\nfrom tests.studies.engine.toy import TOY\nmain(TOY)\n"
    )
    command = [sys.executable, str(script), "--show"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert process.returncode == 1
    assert "name without further dots, got mine.v2.py" in " ".join(process.stderr.split())


def test_the_engine_has_all_names_that_it_exports():
    engine = importlib.import_module("studies.engine")
    for name in engine.__all__:
        assert getattr(engine, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Stdy'"):
        engine.Stdy  # noqa: B018


def test_tables_of_many_conditions_are_whole_in_files():
    for n_columns in (5, 20):
        table = RichTable("right, ood", *[f"condition{number}" for number in range(n_columns)])
        table.add_row("", *["99.1 [98; 100]"] * n_columns)
        width = width_of(table)
        assert (width == FILE_WIDTH) == (n_columns == 5)
        stream = io.StringIO()
        Console(width=width, file=stream).print(table)
        assert stream.getvalue().count("condition") == n_columns
    assert stream.getvalue().count("99.1 [98; 100]") == 20


def test_help_has_a_line_for_each_setting():
    status, output = command_line(TOY, words=["--help"])
    assert status == 0
    lines = [line.strip() for line in output.splitlines()]
    assert "width=8  number of hidden units." in lines
    assert "weights.n=20  examples for the mean input." in lines
    assert "training.keep_at=10,30" in {line.split("  ")[0] for line in lines}
    for name, *_ in TOY.plan().settings:
        assert sum(line.startswith(f"{name}=") for line in lines) == 1, name


def test_a_path_in_an_error_is_not_broken(capsys):
    path = "/folder-and-more" * 20
    with pytest.raises(typer.Exit), exit_on(ValueError):
        raise ValueError(f"cannot write {path}")
    assert path in capsys.readouterr().out


@dataclass(frozen=True, kw_only=True)
class Marked(ToySetup):
    """A setup whose texts look like markup.

    Args:
        width: width [bold] of a layer, in [/a].
        word: a word.
    """

    word: str = "[red]"


def test_text_in_brackets_is_printed_as_it_is(tmp_path):
    """In the markup of rich it is a style, which is not shown, or an error."""
    text = "[ood] [/x] :smile:"
    reading = metric("accuracy", "id")
    claim = Claim(statement=f"claim {text}", source=text, reading=reading, of={}, exceeds=0.1)
    study = Study(
        name="marked",
        question="question [ood] [/x]",
        setup=Marked(model="mlp", training=replace(TOY.setup.training, n_steps=10, keep_at=())),
        grids=({"word": ("[red]", "[/blue]")},),
        presets={"own": Preset(departures={"width": f"departure {text}"})},
        claims=(claim,),
        table=Table(
            title=f"title {text}",
            rows=(Section(f"section {text}"), Row(f"row {text}", reading, note=f"note {text}")),
        ),
    )
    words = ["--out", str(tmp_path / "[out]")]
    shown = {
        "--show": [f"departure {text}", f"claim {text} ({text})"],
        "--help": ["question [ood] [/x]"],
    }
    for option, found in shown.items():
        status, output = command_line(study, words=[*words, "--preset", "own", option])
        output = " ".join(output.split())
        assert status == 0
        assert all(part in output for part in found), output
    assert "width [bold] of a layer, in [/a]." in output
    status, output = command_line(study, words=words)
    output = " ".join(output.split())
    assert status == 0
    names = ("title", "section", "row", "note")
    assert all(f"{name} {text}" in output for name in names), output
    for part in (f"claim {text} ({text})", "[red]", "[/blue]", f"{tmp_path}/[out]/marked-"):
        assert part in output
    status, output = command_line(study, words=["seed=[/x]"])
    assert "error: seed must be of type int, got '[/x]'" in output
