import json
import math
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tasks
from studies.engine import Setup
from studies.engine.checkpoints import load_weights
from studies.engine.folders import RunError, locked
from studies.engine.training import Trainee, TrainingError, cross_entropy, train
from tests.studies.engine import toy

CONFIG = replace(toy.TRAINING, keep_at=(), clip=1.0)


@dataclass(frozen=True)
class Batch:
    inputs: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor

    def __getitem__(self, examples):
        return Batch(self.inputs[examples], self.targets[examples], self.mask[examples])


def sample(step, size):
    """A batch of the task: which of four inputs is the largest?"""
    inputs = torch.randn(size, 1, 4, generator=torch.Generator().manual_seed(step))
    return Batch(inputs, inputs.argmax(-1), torch.ones(size, 1, dtype=torch.bool))


def evaluate(model):
    batch = sample(10_000, 200)
    return {"id/accuracy": (model(batch.inputs).argmax(-1) == batch.targets).float().mean().item()}


def objective(model, batch, step):
    return cross_entropy(model(batch.inputs), batch)


def small_model():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))


def trainee(folder, *, model=None, config=CONFIG, **changes):
    """A small model, or the given one, with `changes` of the arguments of `Trainee`."""
    arguments = {"sample": sample, "evaluate": evaluate, "identity": f"{config}", "seed": 0}
    model = small_model() if model is None else model
    return Trainee(model=model, folder=folder, **(arguments | changes))


def run(folder, *, config=CONFIG, objective=objective, select="id/accuracy", sign=1, **changes):
    """Train a small model, or the given one; `changes` are arguments of `Trainee`."""
    it = trainee(folder, config=config, **changes)
    (log,) = train([it], config=config, objective=objective, select=select, sign=sign)
    return it.model, log


def tensors_in(folder, name="last"):
    return load_file(folder / f"{name}.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("shape", [(3, 2), (3, 1), (3, 2, 1, 5), (6, 5)])
def test_logits_are_one_vector_for_each_target(shape):
    targets = torch.zeros(3, 2).long()
    batch = tasks.Batch(targets, targets, torch.ones(3, 2).bool(), {})
    assert cross_entropy(torch.zeros(3, 2, 5), batch) == pytest.approx(np.log(5))
    message = rf"logits must be \[3, 2, class\] here, got shape {re.escape(str(shape))}"
    with pytest.raises(ValueError, match=message):
        cross_entropy(torch.zeros(shape), batch)
    with pytest.raises(ValueError, match=message):
        Setup.scores(toy.TOY.setup, torch.zeros(shape), batch, "id")


def test_training_agrees_with_a_plain_pytorch_loop(tmp_path):
    config = replace(CONFIG, n_steps=12, evaluate_every=12, beta2=0.9, epsilon=0.1, clip=0.4)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    copy = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    copy.load_state_dict(model.state_dict())
    run(tmp_path / "run", config=config, model=model)

    decayed = [p for n, p in copy.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in copy.named_parameters() if n.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": biases}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.9), eps=0.1)
    optimizer.param_groups[1]["weight_decay"] = 0.0
    norms = []
    for step in range(12):
        warm = min(1, (step + 1) / 5)
        cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - 5) / 7))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * warm * (0.1 + 0.9 * cosine)
        batch = sample(step, 16)
        loss = nn.functional.cross_entropy(copy(batch.inputs)[:, 0], batch.targets[:, 0])
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(copy.parameters(), 0.4))
        optimizer.step()
    for parameter, expected in zip(model.parameters(), copy.parameters(), strict=True):
        assert torch.allclose(parameter, expected, atol=1e-6)
    assert min(norms) < 0.4 < max(norms)


def test_a_batch_in_parts_gives_the_same_gradient_and_loss(tmp_path):
    """Without dropout, whose masks differ; every part but the first has other examples."""
    sizes = []

    def draw(step, size):
        batch = sample(step, size)
        ones = torch.ones(size)
        return tasks.Batch(batch.inputs, batch.targets, batch.mask, {"one": ones})

    def objective_of_part(model, batch, step):
        sizes.append(len(batch.mask))
        return objective(model, batch, step)

    runs = {}
    for n_parts in (1, 4):
        config = replace(CONFIG, n_steps=6, evaluate_every=6, batch_size=32, n_parts=n_parts)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        with torch.no_grad():
            for i, parameter in enumerate(model.parameters()):
                parameter.normal_(generator=torch.Generator().manual_seed(i))
        arguments = {"sample": draw, "objective": objective_of_part, "config": config}
        runs[n_parts] = run(tmp_path / str(n_parts), model=model, **arguments)
    assert sizes == [32] * 6 + [8] * 24
    (model, log), (in_parts, its_log) = runs.values()
    assert its_log[-1]["loss"] == pytest.approx(log[-1]["loss"], rel=1e-5)
    for ours, theirs in zip(in_parts.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_learns_and_logs(tmp_path):
    model, log = run(tmp_path / "run", config=replace(CONFIG, n_steps=300, evaluate_every=100))
    assert evaluate(model)["id/accuracy"] > 0.8
    assert [entry["step"] for entry in log] == [100, 200, 300]
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == log
    best = max(log, key=lambda entry: entry["id/accuracy"])
    load_weights(model, tmp_path / "run" / "best.safetensors")
    assert evaluate(model.eval())["id/accuracy"] == best["id/accuracy"]


def test_the_log_has_the_mean_loss_since_the_previous_evaluation(tmp_path):
    losses, modes = [], []

    def recording_objective(model, batch, step):
        value = objective(model, batch, step)
        losses.append(value.item())
        modes.append(model.training)
        return value

    def recording_evaluate(model):
        modes.append(model.training)
        return evaluate(model)

    _, log = run(
        tmp_path / "run",
        config=replace(CONFIG, n_steps=25),
        objective=recording_objective,
        evaluate=recording_evaluate,
    )
    assert [entry["step"] for entry in log] == [10, 20, 25]
    for entry, part in zip(log, (losses[:10], losses[10:20], losses[20:]), strict=True):
        assert entry["loss"] == pytest.approx(sum(part) / len(part), rel=1e-5)
    # Evaluation mode for evaluations, and training mode right after them.
    assert modes == [*[True] * 10, False, *[True] * 10, False, *[True] * 5, False]


def test_random_numbers_depend_on_the_step_and_the_seed_alone(tmp_path):
    def random_numbers(seed, folder):
        numbers = []

        def recording_objective(model, batch, step):
            numbers.append(torch.rand(()).item())
            return objective(model, batch, step)

        run(folder, objective=recording_objective, seed=seed)
        return numbers

    first, again, other = (
        random_numbers(seed, tmp_path / name) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == again
    assert len({*first, *other}) == 2 * CONFIG.n_steps


def test_masked_targets_do_not_count():
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    batch = sample(0, 2)
    mask = torch.tensor([[True, False, True], [False, False, True]])
    targets = torch.tensor([[0, 1, 2], [3, 0, 1]])
    loss = cross_entropy(logits, Batch(batch.inputs, targets, mask))
    log_probabilities = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert loss == pytest.approx(-log_probabilities[mask].mean().item())


def interrupted(step, size):
    """A sampler that interrupts training at step 27."""
    if step == 27:
        raise KeyboardInterrupt
    return sample(step, size)


def test_a_resumed_run_ends_in_the_same_weights(tmp_path):
    uninterrupted, _ = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", sample=interrupted)
    resumed, log = run(tmp_path / "parts")
    assert [entry["step"] for entry in log] == [10, 20, 30, 40]
    assert same(tensors_in(tmp_path / "whole"), tensors_in(tmp_path / "parts"))
    assert same(dict(uninterrupted.named_parameters()), dict(resumed.named_parameters()))


@pytest.mark.slow
def test_a_killed_process_ends_in_the_same_weights_when_run_again(tmp_path):
    """The process gets SIGKILL in the middle of training."""
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
import torch
torch.set_num_threads(1)
from pathlib import Path
from tests.studies.engine import test_training as t
def slow(step, size):
    time.sleep(0.01)
    return t.sample(step, size)
t.run(Path(sys.argv[1]), sample=slow)
"""
    run(tmp_path / "whole")
    folder = tmp_path / "killed"
    log = folder / "log.jsonl"
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)])
    deadline = time.monotonic() + 180
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert tensors_in(folder)["step/0.weight"] < CONFIG.n_steps
    run(folder)
    assert same(tensors_in(tmp_path / "whole"), tensors_in(folder))
    assert not list(folder.glob(".last*"))


def test_a_finished_run_is_not_repeated(tmp_path):
    run(tmp_path / "run")

    def never(step, size):
        raise AssertionError("a finished run drew a batch")

    model, log = run(tmp_path / "run", sample=never)
    assert len(log) == 4
    assert torch.equal(model[0].weight, tensors_in(tmp_path / "run")["model/0.weight"])


def test_training_ends_early_at_stop_at_and_is_not_resumed(tmp_path):
    config = replace(CONFIG, n_steps=300, stop_at=0.85)
    model, log = run(tmp_path / "run", config=config)
    assert log[-1]["id/accuracy"] >= 0.85
    assert all(entry["id/accuracy"] < 0.85 for entry in log[:-1])
    assert 10 < log[-1]["step"] < 300
    again, same_log = run(tmp_path / "run", config=config)
    assert same_log == log
    assert same(again.state_dict(), model.state_dict())
    _, full_log = run(tmp_path / "full", config=replace(config, stop_at=None))
    metrics = [[entry["loss"], entry["id/accuracy"]] for entry in full_log]
    assert metrics[: len(log)] == [[entry["loss"], entry["id/accuracy"]] for entry in log]


def test_smoothing_shares_a_part_among_the_other_classes():
    """Mean over targets of -sum_c q_c log p_c, with q = 0.9 at the target, 0.1 / 3 elsewhere."""
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 3, 1], [2, 2, 0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    q = torch.full((2, 3, 4), 0.1 / 3).scatter(-1, targets[..., None], 0.9)
    expected = -(q * logits.log_softmax(-1)).sum(-1)[mask].mean()
    smoothed = cross_entropy(logits, Batch(None, targets, mask), smoothing=0.1)
    torch.testing.assert_close(smoothed, expected)
    assert cross_entropy(logits, Batch(None, targets, mask)) != smoothed


def test_the_learning_rate_decays_to_its_final_share():
    steps = (0, 4, 5, 22, 39, 100)
    constant = replace(CONFIG, final_learning_rate=1.0)
    assert [constant.learning_rate_at(step) for step in steps[1:]] == [1e-2] * 5
    decaying = replace(CONFIG, final_learning_rate=0.2)
    rates = [decaying.learning_rate_at(step) for step in steps]
    assert rates[0] == pytest.approx(2e-3)
    assert rates[1:3] == pytest.approx([1e-2, 1e-2])
    halfway = 5 + 35 // 2
    progress = (halfway - 5) / 35
    expected = 1e-2 * (0.2 + 0.8 * (1 + math.cos(math.pi * progress)) / 2)
    assert decaying.learning_rate_at(halfway) == pytest.approx(expected)
    assert rates[-1] == pytest.approx(2e-3)


def test_the_early_cosine_starts_from_zero_and_ends_a_warmup_before_the_last_step():
    """The rates of Schug et al.'s code: optax's warm-up and cosine over n_steps - warmup_steps."""
    config = replace(CONFIG, schedule="early_cosine", n_steps=100, warmup_steps=10)
    rates = [config.learning_rate_at(step) for step in range(100)]
    share = 0.5 * (1 + np.cos(np.pi * np.arange(80) / 80))
    cosine = 0.9 * share + 0.1
    expected = [*np.arange(10) / 10, *cosine, *[0.1] * 10]
    assert rates == pytest.approx([1e-2 * value for value in expected])


def test_the_inverse_square_root_schedule_is_that_of_the_first_transformer():
    """Vaswani et al. 2017, equation 3: d_model^-.5 min(step^-.5, step warmup^-1.5), from step 1."""
    d_model, warmup = 128, 40
    peak = (d_model * warmup) ** -0.5
    config = replace(CONFIG, schedule="inverse_sqrt", learning_rate=peak, warmup_steps=warmup)
    steps = np.arange(1, 1000)
    expected = d_model**-0.5 * np.minimum(steps**-0.5, steps * warmup**-1.5)
    assert [config.learning_rate_at(step) for step in range(999)] == pytest.approx(expected)
    at_once = replace(config, warmup_steps=0)
    assert [at_once.learning_rate_at(step) for step in (0, 3)] == pytest.approx([peak, peak / 2])


@pytest.mark.parametrize("decayed", ["matrices", "all"])
def test_weight_decay_shrinks_the_named_parameters(decayed, tmp_path):
    """Without a gradient only the decay moves weights: by the factor 1 - rate * decay."""

    def no_gradient(model, batch, step):
        return sum(parameter.sum() for parameter in model.parameters()) * 0.0

    config = replace(CONFIG, n_steps=1, warmup_steps=0, weight_decay=0.5, decayed=decayed)
    start = {name: tensor.clone() for name, tensor in small_model().state_dict().items()}
    model, _ = run(tmp_path / "run", config=config, objective=no_gradient)
    for name, tensor in model.state_dict().items():
        factor = 1 - 1e-2 * 0.5 if tensor.ndim > 1 or decayed == "all" else 1.0
        torch.testing.assert_close(tensor, start[name] * factor)
        assert factor == 1.0 or start[name].abs().max() > 0


def assert_last_good_checkpoint(folder):
    """Check that the checkpoint of step 10 is there, with finite tensors."""
    tensors = tensors_in(folder)
    assert tensors["step/0.weight"] == 10
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(tmp_path):
    def poisoned(step, size):
        batch = sample(step, size)
        return replace(batch, inputs=batch.inputs * math.nan) if step >= 15 else batch

    with pytest.raises(TrainingError, match="not finite after a step between 10 and 19"):
        run(tmp_path / "run", sample=poisoned)
    assert_last_good_checkpoint(tmp_path / "run")
    _, log = run(tmp_path / "run")
    assert log[-1]["step"] == 40


def test_a_gradient_that_is_not_finite_stops_and_keeps_the_checkpoint(tmp_path):
    """Right before a checkpoint is due; the loss is still finite, the weights are not."""

    def poisoned(model, batch, step):
        value = objective(model, batch, step)
        return value + (value * 0).sqrt() if step == 19 else value

    with pytest.raises(TrainingError, match="a gradient is not finite after a step between 10 and"):
        run(tmp_path / "run", objective=poisoned)
    assert_last_good_checkpoint(tmp_path / "run")


def test_a_metric_can_be_better_if_it_is_lower(tmp_path):
    def evaluate_loss(model):
        return {"id/loss": 1 - evaluate(model)["id/accuracy"]}

    changes = {"evaluate": evaluate_loss, "select": "id/loss", "sign": -1}
    config = replace(CONFIG, learning_rate=0.3, stop_at=0.15, n_steps=300)
    model, log = run(tmp_path / "run", config=config, **changes)
    assert log[-1]["id/loss"] == min(entry["id/loss"] for entry in log) <= 0.15
    assert log[-1]["step"] < 300
    load_weights(model, tmp_path / "run" / "best.safetensors")
    assert evaluate_loss(model.eval())["id/loss"] == log[-1]["id/loss"]


def test_training_ends_at_stop_at_after_a_metric_that_is_not_a_number(tmp_path):
    values = iter([math.nan, 0.7, 0.9, 0.95])
    config = replace(CONFIG, n_steps=300, stop_at=0.85)
    changes = {"evaluate": lambda model: {"id/accuracy": next(values)}}
    model, log = run(tmp_path / "run", config=config, **changes)
    assert [entry["id/accuracy"] for entry in log[1:]] == [0.7, 0.9]
    load_weights(best := small_model(), tmp_path / "run" / "best.safetensors")
    assert same(best.state_dict(), model.state_dict())


def test_weights_are_kept_at_keep_at_also_in_a_resumed_run(tmp_path):
    config = replace(CONFIG, keep_at=(3, 20, 25, 1000))
    run(tmp_path / "whole", config=config)
    names = {path.name for path in (tmp_path / "whole").glob("step-*")}
    assert names == {f"step-{step}.safetensors" for step in (3, 20, 25)}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", config=config, sample=interrupted)
    checkpoint = tensors_in(tmp_path / "parts")
    assert checkpoint["step/0.weight"] == 20
    weights = {k: v for k, v in checkpoint.items() if k.startswith("model/")}
    assert same(tensors_in(tmp_path / "parts", "step-20"), weights)
    run(tmp_path / "parts", config=config)
    for name in ("step-3", "step-20", "step-25", "last"):
        assert same(tensors_in(tmp_path / "whole", name), tensors_in(tmp_path / "parts", name))
    run(tmp_path / "plain")
    assert same(tensors_in(tmp_path / "whole"), tensors_in(tmp_path / "plain"))


def test_a_run_with_frozen_parameters_can_be_resumed(tmp_path):
    def frozen_bias():
        model = small_model()
        model[0].bias.requires_grad = False
        return model

    trained, _ = run(tmp_path / "whole", model=frozen_bias())
    short = replace(CONFIG, n_steps=20)
    run(tmp_path / "parts", config=short, model=frozen_bias(), identity=f"{CONFIG}")
    assert torch.equal(trained[0].bias, frozen_bias()[0].bias)
    assert "step/0.bias" not in tensors_in(tmp_path / "parts")
    resumed, log = run(tmp_path / "parts", config=short, model=frozen_bias(), identity=f"{CONFIG}")
    assert log[-1]["step"] == 20
    assert torch.equal(resumed[0].bias, trained[0].bias)


def test_checkpoints_of_other_configs_are_refused(tmp_path):
    run(tmp_path / "run")
    with pytest.raises(RunError, match="checkpoint of another config"):
        run(tmp_path / "run", config=replace(CONFIG, n_steps=50))


def test_a_truncated_checkpoint_is_refused_and_kept(tmp_path):
    run(tmp_path / "run")
    path = tmp_path / "run" / "last.safetensors"
    content = path.read_bytes()[:-100]
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"last.safetensors is damaged"):
        run(tmp_path / "run")
    assert path.read_bytes() == content


def test_a_full_disk_is_an_error_and_leaves_existing_files_alone(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    run(folder, config=replace(CONFIG, n_steps=40))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    longer = tmp_path / "longer"

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mechanisms.serialization.save_file", fail)
    with pytest.raises(RunError, match=r"cannot write .*: No space left on device"):
        run(longer)
    assert not list(longer.glob("*.safetensors"))
    assert not list(longer.glob(".[a-z]*-*"))
    run(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="cannot write"):
        run(tmp_path / "file" / "run")


def test_two_processes_cannot_lock_the_same_folder(tmp_path):
    script = "import sys; from filelock import FileLock; FileLock(sys.argv[1], timeout=0).acquire()"
    with locked(tmp_path / "run"):
        command = [sys.executable, "-c", script, str(tmp_path / "run" / ".lock")]
        completed = subprocess.run(command, capture_output=True, text=True)
        assert "could not be acquired" in completed.stderr
        with (
            pytest.raises(RunError, match="another process is using"),
            locked(tmp_path / "run"),
        ):
            pass
    assert subprocess.run(command).returncode == 0


def test_dropout_leaves_the_global_random_state_alone(tmp_path):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    run(tmp_path / "run", config=replace(CONFIG, n_steps=3))
    assert torch.equal(torch.get_rng_state(), before)


def test_compiled_training_leaves_the_eager_model_uncompiled(tmp_path, monkeypatch):
    """Training steps use the compiled handle, evaluations the model itself."""
    calls = []

    def compile_stub(model):
        handle = nn.Sequential(model)
        handle.register_forward_hook(lambda *_: calls.append("compiled"))
        return handle

    monkeypatch.setattr(torch, "compile", compile_stub)
    model, _ = run(tmp_path / "run", config=replace(CONFIG, n_steps=3, compile=True))
    assert len(calls) == 3
    assert isinstance(model, nn.Sequential)
    assert not model._forward_hooks


def test_training_in_bfloat16_keeps_float32_weights(tmp_path):
    model, log = run(tmp_path / "run", config=replace(CONFIG, precision="bf16"))
    assert model[0].weight.dtype == torch.float32
    assert math.isfinite(log[-1]["loss"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"n_steps": 0}, "n_steps must be at least 1, got 0"),
        ({"learning_rate": -1.0}, "learning_rate must be at least 0, got -1.0"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"keep_at": (0, 5)}, r"keep_at must be at least 1, got \(0, 5\)"),
        ({"batch_size": 32, "n_parts": 5}, "n_parts must be a divisor of batch_size = 32, got 5"),
        ({"clip": 0.0}, "clip must be None or greater than 0, got 0.0"),
        ({"epsilon": 0.0}, "epsilon must be greater than 0, got 0.0"),
        ({"beta2": 1.0}, r"beta2 must be in \(0, 1\), got 1.0"),
        ({"precision": "fp8"}, "precision must be one of float32, tf32, bf16, got 'fp8'"),
    ],
)
def test_wrong_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **setting)
