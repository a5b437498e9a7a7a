"""Scoring of models: what a setup must return for each batch."""

from dataclasses import dataclass

import pytest
import torch

from studies.engine.scoring import score
from tests.studies.engine.toy import TOY, ToySetup


@dataclass(frozen=True, kw_only=True)
class Reshaped(ToySetup):
    """A setup whose scores have other shapes.

    Args:
        shape: what is done with a score per example.
    """

    shape: str = "none"

    def scores(self, output, batch, split):
        change = {
            "none": lambda score: score,
            "column": lambda score: score[:, None],
            "mean": torch.mean,
            "part": lambda score: score[:5],
        }[self.shape]
        scores = super().scores(output, batch, split)
        return scores | {"loss": tuple(map(change, scores["loss"]))}


@dataclass(frozen=True, kw_only=True)
class Present(ToySetup):
    """A setup with the groups that a batch happens to have."""

    def groups(self, batch):
        position = batch.latents["position"]
        return {f"largest is {int(position[0])}": position == position[0]}


def score_of(setup):
    model = setup.build(torch.Generator().manual_seed(0)).eval()
    batches = [setup.sampler().batch("id", index, 8) for index in range(4)]
    return score(setup, model, batches, "id")


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ("column", r"\[8, 1\] and \[8, 1\]"),
        ("mean", r"\[\] and \[\]"),
        ("part", r"\[5\] and \[5\]"),
    ],
)
def test_scores_of_other_shapes_are_refused(shape, found):
    assert len(score_of(Reshaped(**vars(TOY.setup))).numerators) == 32
    with pytest.raises(ValueError, match=rf"scores of loss must .* here \[8\], got {found}$"):
        score_of(Reshaped(**vars(TOY.setup), shape=shape))


def test_groups_that_differ_between_batches_are_refused():
    """Their members would be counted under the names of the last batch."""
    message = r"groups must have the same names, .* got all, largest is \d and all, largest is \d$"
    with pytest.raises(ValueError, match=message):
        score_of(Present(**vars(TOY.setup)))
