"""Every test runs on one thread: the models are small, and the runner already uses all cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
