"""The batched solver against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV

from probes.decoding.axes import principal_axes
from probes.decoding.logistic import _Problems, fit_logistic, fit_logistic_cv

PENALTIES = torch.tensor([1e-3, 1e-2, 1e-1, 1.0, 10.0], dtype=torch.float64)


def problem(seed, *, samples=600, features=6, classes=5, strength=1.0, mixing=0.5):
    rng = np.random.default_rng(seed)
    mix = np.eye(features) + mixing * rng.standard_normal((features, features))
    x = rng.standard_normal((samples, features)) @ mix
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    logits = x @ rng.standard_normal((features, classes)) * strength
    return x, (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)


@pytest.mark.parametrize("classes", [2, 3, 8])
@pytest.mark.parametrize("penalty", [1e-3, 1.0, 10.0])
@pytest.mark.parametrize("strength", [0.0, 1.0, 4.0])
def test_agrees_with_scikit_learn(classes, penalty, strength):
    x, y = problem(classes, classes=classes, strength=strength)
    classes = y.max() + 1
    fit = fit_logistic(
        torch.from_numpy(x),
        torch.from_numpy(y)[None],
        torch.tensor([penalty]).double(),
        classes=classes,
    )
    reference = LogisticRegression(C=penalty, tol=1e-10, max_iter=10_000).fit(x, y)
    weight, intercept = fit.weight[0].numpy(), fit.intercept[0].numpy()
    if classes == 2:
        weight, intercept = weight[1:] - weight[:1], intercept[1:] - intercept[:1]
    np.testing.assert_allclose(weight, reference.coef_, atol=2e-3)
    np.testing.assert_allclose(intercept, reference.intercept_, atol=1e-2)
    agreed = (fit.predict(torch.from_numpy(x))[0].numpy() == reference.predict(x)).mean()
    assert agreed >= 1 - 2 / len(x)
    assert fit.converged.all()


def test_problems_side_by_side_are_the_problems_alone():
    x, y = problem(0)
    other = np.random.default_rng(5).permutation(y)
    features = torch.from_numpy(x)
    labels = torch.from_numpy(np.stack([y, other, y, y]))
    penalties = torch.tensor([1e-3, 1.0, 10.0, 1e-2]).double()
    together = fit_logistic(features, labels, penalties, classes=5)
    for i in range(4):
        alone = fit_logistic(features, labels[i : i + 1], penalties[i : i + 1], classes=5)
        torch.testing.assert_close(together.weight[i], alone.weight[0], atol=1e-3, rtol=0)


def test_cross_validation_chooses_what_scikit_learn_chooses():
    x, y = problem(1, strength=0.4)
    fold = np.random.default_rng(0).integers(0, 4, size=len(y))
    fit, chosen, losses = fit_logistic_cv(
        torch.from_numpy(x),
        torch.from_numpy(y)[None],
        torch.from_numpy(fold),
        PENALTIES,
        classes=5,
    )
    reference = LogisticRegressionCV(
        Cs=PENALTIES.tolist(),
        cv=[(np.flatnonzero(fold != i), np.flatnonzero(fold == i)) for i in range(4)],
        scoring="neg_log_loss",
        use_legacy_attributes=False,
        tol=1e-8,
        max_iter=10_000,
        l1_ratios=(0.0,),
    ).fit(x, y)
    assert chosen.item() == reference.C_
    np.testing.assert_allclose(fit.weight[0], reference.coef_, atol=1e-2)
    # scikit-learn weighs folds equally, this code samples equally
    expected = [
        sum(
            -np.log(
                LogisticRegression(C=penalty, tol=1e-8, max_iter=10_000)
                .fit(x[fold != i], y[fold != i])
                .predict_proba(x[fold == i])[np.arange((fold == i).sum()), y[fold == i]]
            ).sum()
            for i in range(4)
        )
        / len(y)
        for penalty in PENALTIES.tolist()
    ]
    np.testing.assert_allclose(losses[0], expected, atol=5e-4)


WIDTHS = [
    # samples, features, classes
    (400, 20, 3),
    (400, 20, 30),
    (240, 120, 4),
    (240, 120, 30),
    (200, 200, 3),
    (200, 200, 12),
    (200, 800, 5),
    (200, 800, 30),
    (120, 1920, 3),
    (120, 1920, 10),
]


@pytest.mark.parametrize("is_noise", [False, True], ids=["labels", "shuffled"])
@pytest.mark.parametrize(("samples", "features", "classes"), WIDTHS)
def test_held_out_cross_entropy_is_scikit_learns_at_any_width(samples, features, classes, is_noise):
    """The ratio of features to samples is 0.05, 0.5, 1, 4 and 16."""
    mixing, strength = features**-0.5, 3 * features**-0.5
    sizes = {"samples": samples, "features": features, "classes": classes}
    x, y = problem(classes, strength=strength, mixing=mixing, **sizes)
    if is_noise:
        y = np.random.default_rng(0).permutation(y)
    fold = np.random.default_rng(1).permutation(samples) % 3
    (axes,) = principal_axes([[torch.from_numpy(x)]], features)
    labels, penalties = torch.from_numpy(y)[None], torch.tensor([1e-3, 1e-1, 10.0]).double()
    choice = fit_logistic_cv(axes, labels, torch.from_numpy(fold), penalties, classes=classes)
    assert choice.fit.converged.all()
    # Any rotation of the features gives the same predictions; this one is numpy's.
    left, scale, _ = np.linalg.svd(x, full_matrices=False)
    rotated = left * scale
    expected = []
    for penalty in penalties.tolist():
        losses = []
        for i in range(3):
            training = fold != i
            held_out = ~training & np.isin(y, y[training])
            reference = LogisticRegression(C=penalty, tol=1e-7, max_iter=20_000)
            reference.fit(rotated[training], y[training])
            probability = reference.predict_proba(rotated[held_out])
            column = np.searchsorted(reference.classes_, y[held_out])
            losses.extend(-np.log(probability[np.arange(len(column)), column]))
        expected.append(np.mean(losses))
    np.testing.assert_allclose(choice.losses[0], expected, atol=1e-3)
    assert choice.penalty.item() == penalties[np.argmin(expected)]


def test_a_wide_code_need_not_be_in_memory_as_a_whole():
    x, y = problem(4, samples=60, features=300)
    other, _ = problem(5, samples=40, features=300)
    parts = [[torch.from_numpy(values[:, i : i + 50]) for values in (x, other)]
             for i in range(0, 300, 50)]  # fmt: skip
    fit, test = principal_axes(iter(parts), 300)
    assert fit.shape[1] < 60
    arguments = {"penalties": torch.tensor([0.1]).double(), "classes": 5}
    in_axes = fit_logistic(fit, torch.from_numpy(y)[None], **arguments)
    reference = LogisticRegression(C=0.1, tol=1e-10, max_iter=10_000).fit(x, y)
    scaled = (other - x.mean(axis=0)) / x.std(axis=0)
    logits = test @ in_axes.weight[0].T + in_axes.intercept[0]
    np.testing.assert_allclose(
        logits.log_softmax(1), reference.predict_log_proba(scaled), atol=2e-4
    )


def test_constant_features_and_equal_features_are_harmless():
    x, y = problem(2)
    x = np.concatenate([x, np.zeros((len(x), 2)), x[:, :1]], axis=1)
    fit = fit_logistic(
        torch.from_numpy(x), torch.from_numpy(y)[None], torch.tensor([1.0]).double(), classes=5
    )
    reference = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000).fit(x, y)
    np.testing.assert_allclose(fit.weight[0], reference.coef_, atol=2e-3)
    # Their axes are eigenvectors, which are orthogonal to the others up to rounding.
    assert fit.weight[0, :, 6:8].abs().max() < 1e-12


def test_separable_data_converge():
    x = np.repeat(np.eye(3), 50, axis=0)
    y = np.repeat(np.arange(3), 50)
    fit = fit_logistic(
        torch.from_numpy(x), torch.from_numpy(y)[None], torch.tensor([1e4]).double(), classes=3
    )
    assert fit.converged.all()
    assert (fit.predict(torch.from_numpy(x))[0].numpy() == y).all()


@pytest.fixture
def evaluations(monkeypatch):
    """An entry per evaluation of the objective."""
    made = []
    objective = _Problems.objective
    monkeypatch.setattr(
        _Problems, "objective", lambda self, weights: made.append(1) or objective(self, weights)
    )
    return made


def test_small_losses_do_not_stall_in_rounding(evaluations):
    """Of one positive among 200 the loss is a small difference of larger terms."""
    for seed in range(20):
        x, _ = problem(seed, samples=200, features=8)
        y = (np.arange(200) == seed).astype(int)
        fit_logistic_cv(
            torch.from_numpy(x),
            torch.from_numpy(y)[None],
            torch.arange(200) % 5,
            PENALTIES,
            classes=2,
        )
    assert len(evaluations) < 20 * 100


def test_folds_with_a_single_class_are_solved_at_once(evaluations):
    """One positive among all samples: the fold that holds it out has nothing to learn."""
    x, _ = problem(4, samples=200, features=8)
    y = np.zeros(200, dtype=int)
    y[3] = 1
    fold = np.arange(200) % 5
    fit, chosen, losses = fit_logistic_cv(
        torch.from_numpy(x), torch.from_numpy(y)[None], torch.from_numpy(fold), PENALTIES, classes=2
    )
    assert len(evaluations) < 200
    assert fit.converged.all()
    reference = LogisticRegression(C=chosen.item(), tol=1e-10, max_iter=10_000).fit(x, y)
    np.testing.assert_allclose(fit.weight[0, 1] - fit.weight[0, 0], reference.coef_[0], atol=2e-3)
    # The positive itself is not counted, since a fit without it cannot predict it.
    expected = []
    for penalty in PENALTIES.tolist():
        held_out = np.zeros(199)
        for number in set(range(5)) - {3}:
            model = LogisticRegression(C=penalty, tol=1e-8, max_iter=10_000)
            model.fit(x[fold != number], y[fold != number])
            of_fold = fold[np.arange(200) != 3] == number
            probability = model.predict_proba(x[fold == number])
            held_out[of_fold] = -np.log(probability[:, 0])
        expected.append(held_out.mean())
    np.testing.assert_allclose(losses[0], expected, atol=5e-4)


def test_a_class_without_samples_is_never_predicted():
    x, y = problem(3, classes=3)
    labels = torch.from_numpy(np.array([0, 2, 5])[y])[None]
    fit = fit_logistic(torch.from_numpy(x), labels, torch.tensor([1.0]).double(), classes=6)
    reference = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000).fit(x, y)
    np.testing.assert_allclose(fit.weight[0, [0, 2, 5]], reference.coef_, atol=2e-3)
    assert set(fit.predict(torch.from_numpy(x))[0].tolist()) <= {0, 2, 5}
    # Where only one fold has a class, its held-out samples do not break the choice
    fold = torch.arange(len(y)) % 3
    labels[0, labels[0] == 5] = 0
    labels[0, 0] = 5
    _, _, losses = fit_logistic_cv(torch.from_numpy(x), labels, fold, PENALTIES, classes=6)
    assert losses.isfinite().all()
