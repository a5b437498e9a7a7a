"""A step of training Raven at the size of the paper on a GPU: eager, compiled, ten as one."""

import pytest
import torch

from studies import raven_latent_code
from studies.engine.checkpoints import read_log
from studies.engine.trainees import run_training

CASES = [
    *(("hyla", 1, precision, True) for precision in ("float32", "tf32", "bf16")),
    *((model, 1, "tf32", True) for model in ("softmax", "linear")),
    *((model, 1, "tf32", False) for model in ("softmax", "hyla")),
    *((model, 10, "tf32", True) for model in ("softmax", "hyla")),
]


@pytest.mark.parametrize(("model", "n", "precision", "compiled"), CASES)
def test_a_step_of_raven(model, n, precision, compiled, record, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    seeds = ",".join(map(str, range(n)))
    changes = (
        f"model={model} seed={seeds} training.learning_rate=0.001 training.weight_decay=0.1 "
        f"training.precision={precision} training.compile={str(compiled).lower()} n_validation=16 "
        "training.n_steps=400 training.evaluate_every=200 training.warmup_steps=100"
    )
    setups = raven_latent_code.STUDY.plan("paper", changes.split()).cells
    folders = [tmp_path / "models" / str(number) for number in range(n)]
    run_training(setups, folders, "cuda")
    # The first part has the compilation.
    first, second = read_log(folders[0])
    milliseconds = (second["seconds"] - first["seconds"]) * n / 200 * 1000
    how = "compiled" if compiled else "eager"
    what = f"milliseconds per step, {model}, {n} as one, {how}, {precision}"
    record(f"{torch.cuda.get_device_name()}: {what}", f"{milliseconds:.1f}")
