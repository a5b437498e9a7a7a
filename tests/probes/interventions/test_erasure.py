"""Erasure on models of which it is known where they read the label."""

from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from probes import erase
from probes.interventions import erasure
from probes.interventions.erasure import _Samples

CLASSES, D = 4, 12


class Reader(HookedRootModule):
    """Answers the label that it reads from codes [example, 2, D], which both have it.

    `hook_used` is what it reads, at `position`; `hook_unused` is the same, with the weight 0.
    `hook_both.0` and `.1` are two copies; the answer is right if either has the label.
    """

    def __init__(self, position=1):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.linalg.qr(torch.randn(D, D, generator=generator)).Q[:CLASSES] * 4
        self.position = position
        self.hook_used, self.hook_unused = HookPoint(), HookPoint()
        self.hook_copies = nn.ModuleList([HookPoint(), HookPoint()])
        self.setup()

    def forward(self, codes):
        unused = self.hook_unused(codes)
        first, second = (hook(codes) for hook in self.hook_copies)
        used = self.hook_used(codes) + 0 * unused
        return ((used + 0 * first + 0 * second)[:, self.position] @ self.table.T).argmax(-1)


class Copies(Reader):
    def forward(self, codes):
        first = self.hook_copies[0](codes)
        second = self.hook_copies[1](first + codes)
        return ((first + second)[:, self.position] @ self.table.T).argmax(-1)


def data(seed, n=300):
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (n,), generator=generator)
    noise = torch.randn(n, 2, D, generator=generator)
    return Reader().table[label][:, None] + noise, label


def run(model, hooks, n=300, **settings):
    (fit, label), (test, truth) = data(0, n), data(1)
    return erase(
        model, fit, label, test, hooks=hooks, answer=lambda output: output,
        outcomes={"right": truth}, **{"draws": 5} | settings
    )  # fmt: skip


@pytest.mark.parametrize("extra", [0, 500])
def test_the_label_cannot_be_read_any_more(extra):
    codes, label = data(0)
    noise = torch.randn(len(label), extra, generator=torch.Generator().manual_seed(2))
    x = torch.cat([codes[:, 0], 0.1 * noise], dim=1).double()
    samples = _Samples.of(x, 1)
    eraser = samples.label_eraser(label)
    majority = torch.bincount(label).max().item() / len(label)
    before, after = (
        LogisticRegression(C=100).fit(values, label).score(values, label)
        for values in (x.numpy(), eraser(x).numpy())
    )
    assert before == 1.0
    assert after <= majority + 0.02
    one_hot = nn.functional.one_hot(label).double()
    erased = eraser(x)
    covariance = (erased - erased.mean(0)).T @ (one_hot - one_hot.mean(0)) / len(x)
    assert covariance.abs().max() < 0.01
    assert eraser.rank == CLASSES - 1
    # A random subspace of the same rank leaves it readable.
    other = samples.random_eraser(eraser.rank, torch.Generator().manual_seed(1))
    assert torch.linalg.matrix_rank(x - x.mean(0) - (other(x) - x.mean(0))) == CLASSES - 1
    kept = LogisticRegression(C=100).fit(other(x).numpy(), label).score(other(x).numpy(), label)
    assert kept > 0.7


def test_a_rare_class_cannot_be_read_any_more():
    x = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0)).double()
    is_rare = torch.arange(len(x)) < 3
    x[is_rare] += 2
    eraser = _Samples.of(x, 1).label_eraser(is_rare.long())
    assert eraser.rank == 1
    before, after = (each[is_rare].mean(0) - each[~is_rare].mean(0) for each in (x, eraser(x)))
    assert after.norm() < 1e-6 * before.norm()


def test_labels_of_the_control_are_the_same_in_all_samples_of_an_example():
    fitted = []

    class Recorded(_Samples):
        def label_eraser(self, labels):
            fitted.append(labels.view(self.shape))
            return super().label_eraser(labels)

    with mock.patch.object(erasure, "_Samples", Recorded):
        run(Reader(), {"used": "hook_used"}, samples=2, draws=2)
    erased, *controls = fitted
    assert len(controls) == 2
    for labels in fitted:
        assert (labels == labels[:, :1]).all()
        assert (labels.unique(return_counts=True)[1] == erased.unique(return_counts=True)[1]).all()
    assert all((labels != erased).any() for labels in controls)


def test_answers_suffer_where_the_label_is_used_and_only_there():
    result = run(Reader(), {"used": "hook_used", "unused": "hook_unused"}, entries=np.s_[:, 1])
    rate = result["rate"].sel(outcome="right")
    assert (rate.sel(condition="none") > 0.99).all()
    assert rate.sel(condition="erased", site="used") < 0.45
    assert (rate.sel(condition=["control", "random"], site="used") > 0.6).all()
    assert (rate.sel(site="unused") == rate.sel(condition="none", site="unused")).all()
    effect = result.sel(outcome="right")
    assert (effect["effect_high"].sel(site="used") < -0.2).all()
    assert (effect["effect"].sel(site="unused") == 0).all()
    assert result["rank"].sel(site="used") == CLASSES - 1
    removed = result["removed"].sel(site="used")
    assert removed.sel(condition="none") == 0
    assert removed.sel(condition="erased") > removed.sel(condition="control")
    # Rates of controls are means over draws.
    hits = result["hit"].sel(condition="random", site="used", outcome="right")
    assert hits.mean() == pytest.approx(rate.sel(condition="random", site="used").item())
    assert set(np.round(hits * 5, 6).values.tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
    assert all(variable.attrs["long_name"] for variable in result.data_vars.values())


def test_other_entries_are_left_alone():
    result = run(Reader(position=1), {"used": "hook_used"}, entries=np.s_[:, 0])
    assert (result["rate"].sel(outcome="right") > 0.99).all()


def test_positions_may_be_samples():
    """One erasure for both positions, with a label per example or per position."""
    at_once = run(Reader(), {"used": "hook_used"}, samples=2)
    assert at_once["rate"].sel(condition="erased", outcome="right") < 0.45
    fit, label = data(0)
    test, truth = data(1)
    settings = {"hooks": {"used": "hook_used"}, "answer": lambda output: output, "draws": 5}
    per_position = erase(
        Reader(), fit, label[:, None].expand(-1, 2), test, outcomes={"right": truth}, samples=2,
        **settings
    )  # fmt: skip
    assert per_position.identical(at_once)


def test_all_hooks_of_a_site_are_erased_one_after_the_other():
    result = run(Copies(), {"first": "hook_copies.0", "both": "hook_copies.*"}, entries=np.s_[:, 1])
    erased = result["rate"].sel(condition="erased", outcome="right")
    # After the first alone the second one has the label from the codes.
    assert erased.sel(site="first") > 0.9
    assert erased.sel(site="both") < 0.45


def test_codes_may_be_wider_than_there_are_examples():
    result = run(Reader(), {"used": "hook_used"}, n=20)
    assert result["rate"].sel(condition="erased", outcome="right") < 0.75


def test_the_seed_decides():
    hooks = {"used": "hook_used"}
    first = run(Reader(), hooks)
    assert first.identical(run(Reader(), hooks))
    assert not first.identical(run(Reader(), hooks, seed=1))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"labels": torch.zeros(300, dtype=torch.long)}, ValueError, "at least two values, got"),
        ({"labels": torch.rand(300)}, TypeError, "integers or booleans, got torch.float32"),
        ({"labels": [0] * 300}, TypeError, "labels of erase must be Tensor, got list"),
        ({"labels": torch.arange(7)}, ValueError, r"the 300 examples of fit_inputs, got \(7,\)"),
        ({"hooks": {"x": "hook_use"}}, KeyError, "nearest: hook_used"),
        ({"hooks": {}}, ValueError, "at least one site"),
        ({"outcomes": {}}, ValueError, "at least one outcome"),
        ({"samples": 0}, ValueError, "samples must be at least 1, got 0"),
        ({"samples": 3}, ValueError, r"entries must select 3 sample dims and features from .*"),
        ({"draws": 0}, ValueError, "draws must be at least 1, got 0"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"fit_inputs": torch.cat([data(0, 299)[0], torch.full((1, 2, D), torch.nan)])}, ValueError,
         r"activations at 'hook_used' must be finite, got 24 NaN or infinite values"),
        ({"outcomes": {"right": torch.zeros(300, 2).long()}}, ValueError, "shape of the answers"),
    ],
)  # fmt: skip
def test_invalid_input_is_refused(changes, error, message):
    (fit, label), (test, truth) = data(0), data(1)
    arguments = {
        "model": Reader(), "fit_inputs": fit, "labels": label, "inputs": test,
        "hooks": {"used": "hook_used"}, "answer": lambda output: output,
        "outcomes": {"right": truth}, "draws": 1,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        erase(**arguments | changes)
