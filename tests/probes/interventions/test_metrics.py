"""Interchange scored by numbers instead of answers."""

import numpy as np
import pytest
import torch
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from probes import interchange

N = 40
BASE, SOURCE = (torch.randn(N, 3, generator=torch.Generator().manual_seed(s)) for s in range(2))


class Sum(HookedRootModule):
    """Two logits: the sum of the first two inputs, and the third."""

    def __init__(self):
        super().__init__()
        self.hook_sum, self.hook_third = HookPoint(), HookPoint()
        self.setup()

    def forward(self, x):
        first = self.hook_sum(x[:, :2].sum(1, keepdim=True))
        return torch.cat([first, self.hook_third(x[:, 2:])], dim=1)


def difference(logits, rows):
    return logits[:, 0] - logits[:, 1]


def run(**settings):
    return interchange(
        Sum(), BASE, SOURCE, hooks={"sum": "hook_sum", "both": ["hook_sum", "hook_third"]},
        where=torch.ones(1, 1, dtype=torch.bool), batch_size=7, **settings,
    )  # fmt: skip


def test_values_and_changes_are_means_over_examples():
    target = torch.arange(N)
    error = {"error": lambda logits, rows: (logits[:, 1] - target[rows]).abs()}
    found = run(metrics={"difference": difference} | error)
    assert found["value"].dims == ("site", "metric")
    expected = {
        "none": BASE[:, :2].sum(1) - BASE[:, 2],
        "sum": SOURCE[:, :2].sum(1) - BASE[:, 2],
        "both": SOURCE[:, :2].sum(1) - SOURCE[:, 2],
    }
    for site, values in expected.items():
        at = found.sel(site=site, metric="difference")
        np.testing.assert_allclose(at["example_value"], values, rtol=1e-5, atol=1e-6)
        assert at["value"] == pytest.approx(values.mean().item(), abs=1e-6)
        assert at["change"] == pytest.approx((values - expected["none"]).mean().item(), abs=1e-6)
    assert (found["change"].sel(metric="error", site=["none", "sum"]) == 0).all()
    changed = found.sel(site="sum", metric="difference")
    assert changed["change_low"] < changed["change"] < changed["change_high"]
    assert "rate" not in found


def test_answers_and_metrics_can_be_scored_together():
    answer = {"answer": lambda logits: (logits[:, 0] > 0).long()}
    outcomes = {"source": (SOURCE[:, :2].sum(1) > 0).long()}
    found = run(metrics={"difference": difference}, outcomes=outcomes, **answer)
    assert found["rate"].sel(site="sum", outcome="source") == 1
    assert found.sel(site="none")["change"].item() == 0


def test_invalid_metrics_are_refused():
    with pytest.raises(ValueError, match="answer and outcomes must be passed together, or metrics"):
        run()
    with pytest.raises(
        ValueError, match=r"metrics\['d'\] must return a tensor \[7 .*, got \(7, 2\)"
    ):
        run(metrics={"d": lambda logits, rows: logits})
    with pytest.raises(ValueError, match=r"metrics\['d'\] must be finite"):
        run(metrics={"d": lambda logits, rows: logits[:, 0] / 0})
