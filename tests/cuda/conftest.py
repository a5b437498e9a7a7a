"""Every test here runs on the CPU, as a rehearsal, and on a CUDA device where there is one.

python -m pytest tests/cuda -m cuda         # on a machine with a GPU
python -m pytest tests/cuda -m "not cuda"   # the rehearsal, part of every run of the tests
"""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request, monkeypatch):
    """The device of a test; nothing is rounded to TF32 there unless the test asks for it."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    precision = torch.get_float32_matmul_precision()
    # By default cuDNN rounds the inputs of convolutions and recurrent layers.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield request.param
    # Training in TF32 sets it for the process.
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def quick_compilation(device, monkeypatch):
    """Nothing is compiled on the CPU, where it would take most of the time of all tests here."""
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    yield
    torch._dynamo.reset()
