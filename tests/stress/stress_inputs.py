"""Wrong inputs, generated and hand-made: each ends soon, in a short error that says why."""

import inspect
import json
import pickle
import random
import time
from functools import partial

import numpy as np
import torch
import xarray as xr
from typer.testing import CliRunner

import probes
from studies import cli
from studies.engine import Resources, RunError, read_result, run
from studies.zoo import all_studies
from tests.contracts.models import MODELS, build
from tests.stress.processes import LONGEST
from tests.studies.engine.toy import TOY

SLOWEST = 10.0
WRONG_SETTINGS = ("banana", "-1", "nan", "1e400", "[1", "none,none", "")
N_SETTINGS = 150
ERRORS = (TypeError, ValueError, KeyError)
WRONG_ARGUMENTS = (None, "text", float("nan"), xr.Dataset(), xr.DataArray([np.nan, 1.0]), [], {})


class Ledger:
    """What became of wrong inputs.

    Attributes:
        refused: number of inputs that ended in an expected error.
        accepted: inputs that were taken.
        wrong: inputs whose error was of another kind, too long or too late.
    """

    def __init__(self):
        self.refused, self.accepted, self.wrong = 0, [], []

    def attempt(self, what, call, *expected, says=""):
        began = time.monotonic()
        try:
            call()
        except expected as error:
            message = str(error)
            ok = len(message) <= LONGEST and says in message and message.strip()
            if ok and time.monotonic() - began < SLOWEST:
                self.refused += 1
            else:
                self.wrong.append(f"{what}: {message[:200]!r}")
        except Exception as error:
            self.wrong.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
        else:
            self.accepted.append(what)

    def close(self, record, label, *, some_are_right=False):
        """Record the numbers; nothing may have been taken, unless some inputs may be right."""
        n = self.refused + len(self.accepted) + len(self.wrong)
        record(label, f"{self.refused} of {n} refused, {len(self.accepted)} taken", "none unclear")
        assert not self.wrong, "\n".join(self.wrong)
        assert some_are_right or not self.accepted, "\n".join(self.accepted)


def test_settings(record, share):
    rng, ledger = random.Random(0), Ledger()
    every = [
        (study, name, value, wrong)
        for study in all_studies().values()
        for name, value, _ in study.settings
        for wrong in WRONG_SETTINGS
    ]
    for study, name, value, wrong in rng.sample(every, max(20, round(N_SETTINGS * share))):
        what = f"{study.name}: {name}={wrong} (default {value!r})"
        says = name.rpartition(".")[2]
        ledger.attempt(
            what, partial(study.plan, "smoke", [f"{name}={wrong}"]), ValueError, says=says
        )
    # Minus one may be a bias or a seed, and text may be a path.
    ledger.close(record, "settings of all studies", some_are_right=True)
    assert not [what for what in ledger.accepted if "banana" in what and "'" not in what]


COMMANDS = """
run
run nothing
run raven_latent_code --preset smokey
run raven_latent_code --presets smoke
run raven_latent_code training.n_step=5
run raven_latent_code training=5
run raven_latent_code training.n_steps
run raven_latent_code =5
run raven_latent_code seed=
run raven_latent_code seed=1,1
run raven_latent_code seed=0..3
run raven_latent_code model=HYLA
run raven_latent_code --workers 0
run raven_latent_code --workers many
run raven_latent_code --device gpu
run raven_latent_code --together 0
run raven_latent_code --minutes -1
run coda_arithmetic --study nothing
run missing.py
run pyproject.toml
show
show nothing.nc
show pyproject.toml
view
view nothing
view nothing.nc
view . --study nothing.py
check
check nothing
check nothing.py:x
check tests:x
check nothing.nc
list everything
made_up
""".strip().splitlines()


def test_command_lines(record, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = Ledger()

    def command(words):
        done = CliRunner().invoke(cli.app, words.split(), env={"COLUMNS": "200"})
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code:
            raise ValueError(done.output)

    for words in COMMANDS:
        ledger.attempt(words, lambda: command(words), ValueError)  # noqa: B023
    ledger.close(record, "command lines")


def test_arguments_of_probes(record):
    ledger = Ledger()
    for name in probes.__all__:
        function = getattr(probes, name)
        if not inspect.isroutine(function):
            continue
        required = [
            one.name
            for one in inspect.signature(function).parameters.values()
            if one.default is one.empty and one.kind is not one.VAR_KEYWORD
        ]
        for wrong in WRONG_ARGUMENTS:
            arguments = dict.fromkeys(required, wrong)
            ledger.attempt(f"{name}({wrong!r:.40})", partial(function, **arguments), *ERRORS)
    ledger.close(record, "arguments of probes", some_are_right=True)


def test_inputs_of_models(record):
    ledger = Ledger()
    for name, (config, (first, *rest)) in MODELS.items():
        model = build(config).eval()
        wrong = {
            "another dtype": first.long() if first.is_floating_point() else first + 0.5,
            "one more dim": first[None, None, None],
            "one dim less": first[0][0],
            "text": "text",
        }
        if first.is_floating_point():
            wrong["a wider input"] = torch.cat([first, first], -1)
        else:
            wrong["an unknown token"] = first + 10_000
        for label, one in wrong.items():
            errors = (TypeError, ValueError, RuntimeError, IndexError, AttributeError)
            ledger.attempt(f"{name}: {label}", lambda: model(one, *rest), *errors)  # noqa: B023
    ledger.close(record, "inputs of models", some_are_right=True)


class Poison:
    """A pickle that leaves a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_files(tmp_path, record):
    ledger, rng = Ledger(), random.Random(0)
    resources = Resources(root=tmp_path / "runs", workers=1)
    folder = run(TOY, changes=["seed=0", "model=mlp"], resources=resources)
    whole, victim = (folder / "result.nc").read_bytes(), tmp_path / "result.nc"
    executed = tmp_path / "executed"

    def reads(content):
        victim.write_bytes(content)
        read_result(victim)

    for share in (0, 0.1, 0.5, 0.9, 0.999):
        end = int(share * len(whole))
        ledger.attempt(f"cut at {end}", lambda: reads(whole[:end]), ValueError, OSError)  # noqa: B023
    ledger.attempt("pickle", lambda: reads(pickle.dumps(Poison(executed))), ValueError, OSError)
    ledger.attempt("text", lambda: reads(b"text"), ValueError, OSError)
    older = read_result(folder / "result.nc")
    older.attrs["schema_version"] = 1
    older.to_netcdf(victim)
    ledger.attempt("older schema", lambda: read_result(victim), ValueError)
    foreign = tmp_path / "foreign.nc"
    xr.Dataset({"x": 1}).to_netcdf(foreign)
    ledger.attempt("foreign", lambda: read_result(foreign), ValueError)

    (model,) = (tmp_path / "runs" / "models").iterdir()
    (folder / "result.nc").unlink()
    for file in sorted(model.iterdir()):
        good = file.read_bytes()
        for label, content in {
            "cut": good[: len(good) // 2],
            "empty": b"",
            "poisoned": pickle.dumps(Poison(executed)),
            "flipped": bytes(byte ^ (rng.random() < 0.05) for byte in good),
        }.items():
            file.write_bytes(content)
            what = f"{file.name} {label}"
            changes = ["seed=0", "model=mlp", "scores.n_test=123"]
            ledger.attempt(what, lambda: run(TOY, changes=changes, resources=resources), RunError)  # noqa: B023
            file.write_bytes(good)
            for made in (tmp_path / "runs").glob("toy-*/result.nc"):
                made.unlink()
    assert not executed.exists()
    ledger.close(
        record,
        "damaged files (taken: those that are not read, or are made anew)",
        some_are_right=True,
    )
    assert json.loads(
        read_result(run(TOY, changes=["seed=0"], resources=resources) / "result.nc").attrs["seeds"]
    )
