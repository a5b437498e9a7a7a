"""Steps that linear and logistic decoders share: arguments, standardisation and folds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from probes.decoding.cells import Table


def standardise(
    fit: Float[Tensor, "sample feature"], *others: Float[Tensor, "other feature"]
) -> list[Tensor]:
    """Scale features to zero mean and unit variance in `fit`, and the others by the same map.

    Features that are constant in `fit` (up to rounding) become zero everywhere.
    """
    mean, deviation = fit.mean(dim=0), fit.std(dim=0, correction=0)
    constant = deviation <= 1e-9 * (fit.abs().amax(dim=0) + 1e-30)
    scale = torch.where(constant, 1.0, deviation)
    return [torch.where(constant, 0.0, (features - mean) / scale) for features in (fit, *others)]


def fold_of_samples(table: Table, folds: int, seed: int) -> Int[Tensor, " sample"]:
    """Assign examples to folds of equal size at random, and return the fold of each sample.

    Raises:
        ValueError: there are fewer than 2 folds, or more folds than examples.
    """
    if not 2 <= folds <= table.n_examples:
        raise ValueError(f"folds must be in 2..{table.n_examples} (examples), got {folds}")
    order = torch.randperm(table.n_examples, generator=derive_generator(seed, "folds"))
    fold = torch.empty(table.n_examples, dtype=torch.long)
    fold[order] = torch.arange(table.n_examples) % folds
    return fold[torch.from_numpy(table.example)]


def check_arguments(penalties: Sequence[float], resamples: int) -> None:
    """Check arguments that both decoders take."""
    if not penalties or not all(0 < penalty < float("inf") for penalty in penalties):
        raise ValueError(f"penalties must be one or more positive numbers, got {penalties}")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch on one thread, which is faster for blocks as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
