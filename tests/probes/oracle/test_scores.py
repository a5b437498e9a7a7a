import numpy as np
import pytest
import torch

from probes import score_paths, search_paths
from tests.probes.oracle.path_models import ADD, HIGHER, MULTIPLY, OPERATIONS, SINE, Operations

PERMUTED = (2, 0, 3, 1)  # module i is operation PERMUTED[i]


def planted(examples=480, seed=0):
    """Modules that are the operations of the tasks, in another order; all 16 tasks of length 2."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(examples, 2, generator=generator) * 2 - 1
    task = torch.arange(examples) % 16
    truth = Operations(OPERATIONS)
    partial = truth.begin(inputs)
    for layer, operation in enumerate((task // 4, task % 4)):
        reached = truth.advance(inputs, layer, partial)
        partial = reached[torch.arange(examples), :, operation]
    modules = Operations([OPERATIONS[operation] for operation in PERMUTED])
    return modules, inputs, partial[:, 0], task


def untrained():
    generator = torch.Generator().manual_seed(5)
    draws = torch.randn(4, 3, generator=generator).tolist()
    return Operations([lambda r, x, a=a, b=b, c=c: a * r + b * x + c for a, b, c in draws])


def test_planted_modules_are_found_and_untrained_ones_are_not():
    model, inputs, targets, task = planted()
    routed = torch.zeros(480, 2, dtype=torch.long)
    result = score_paths(
        model, inputs, targets, routed=routed, task=task, untrained=untrained(), resamples=200
    )
    own = result.sel(control="trained")
    # The sine of a number is not the same to the last digit in tensors of all shapes.
    assert (own["loss"].sel(path=["sample", "task"]) < 1e-12).all()
    assert (own["loss"].sel(path=["routed", "mean"]) > 0.05).all()
    # Each task's path is its operations, in the order of the modules.
    module_of = np.argsort(PERMUTED)
    assert own["task_path"].to_numpy().tolist() == [
        [module_of[t // 4], module_of[t % 4]] for t in range(16)
    ]
    null = result.sel(control="untrained")
    # The best of 16 draws looks good also where modules know nothing: not so the honest path.
    assert 0 < null["loss"].sel(path="sample") < 0.5 * null["loss"].sel(path="task")
    assert null["loss"].sel(path="task") > 0.02
    assert (result["loss_low"] <= result["loss"] + 1e-12).all()
    assert (result["loss"] <= result["loss_high"] + 1e-12).all()
    assert (null["loss_low"] < null["loss_high"]).all()
    assert result["scored"].to_numpy().tolist() == [15] * 16
    np.testing.assert_allclose(result["task_loss"].mean("task"), result["loss"], atol=1e-12)
    np.testing.assert_allclose(
        result["regret"].sum("layer"),
        result["loss"].sel(path="routed") - result["loss"].sel(path="sample"),
        atol=1e-12,
    )


def test_scores_are_those_of_the_search_on_one_half():
    """With two examples of a task, one chooses the path and the other is scored."""
    model, inputs, targets, _ = planted(8)
    task = torch.tensor([5, 5, 7, 7, 7, 2, 2, 7])
    routed = torch.randint(4, (8, 2), generator=torch.Generator().manual_seed(1))
    targets = targets + 0.1 * torch.randn(8, 1, generator=torch.Generator().manual_seed(2))
    options = {"routed": routed, "untrained": model, "resamples": 10}
    result = score_paths(model, inputs, targets, task=task, **options)
    assert result["task"].to_numpy().tolist() == [2, 5, 7]
    assert result["scored"].to_numpy().tolist() == [1, 1, 2]
    each = search_paths(model, inputs, targets, routed=routed)
    for one in (2, 5):
        first, second = (task == one).nonzero()[:, 0].tolist()
        means = result["task_loss"].sel(task=one, control="trained")
        names = {"sample": "best_loss", "routed": "routed_loss", "mean": "mean_loss"}
        matches = [
            all(np.isclose(means.sel(path=p), each[v][row]) for p, v in names.items())
            for row in (first, second)
        ]
        assert sum(matches) == 1
        chooser = (second, first)[matches.index(True)]
        chosen = result["task_path"].sel(task=one, control="trained")
        assert chosen.to_numpy().tolist() == each["best_path"][chooser].to_numpy().tolist()
    again = score_paths(model, inputs, targets, task=task, **options)
    assert result.identical(again)
    limited = score_paths(model, inputs, targets, task=task, memory_limit=2000, **options)
    for name in ("loss", "regret", "task_loss", "task_path"):
        np.testing.assert_allclose(limited[name], result[name], atol=1e-12)


def test_the_path_of_a_task_is_one_that_no_sample_needs_to_like():
    """Half of a task adds, half multiplies: by sample all is right, no single path is."""
    inputs = torch.rand(400, 2, generator=torch.Generator().manual_seed(0))
    network = Operations((ADD, MULTIPLY), n_layers=1)
    answers = network.advance(inputs, 0, network.begin(inputs))[:, 0, :, 0]
    targets = answers[torch.arange(400), torch.arange(400) % 2][:, None]
    result = score_paths(
        network,
        inputs,
        targets,
        routed=torch.zeros(400, 1, dtype=torch.long),
        task=torch.zeros(400, dtype=torch.long),
        untrained=Operations((SINE, HIGHER), n_layers=1),
    ).sel(control="trained")
    assert result["loss"].sel(path="sample") == 0
    either = (answers[:, 0] - answers[:, 1]).square().mean().item() / 2
    assert result["loss"].sel(path="task").item() == pytest.approx(either, rel=0.2)


def test_invalid_input_is_refused():
    model, inputs, targets, task = planted(32)
    options = {"routed": torch.zeros(32, 2, dtype=torch.long), "untrained": model, "task": task}

    def score(**changes):
        return score_paths(model, inputs, targets, **(options | changes))

    with pytest.raises(ValueError, match=r"resamples must be at least 1, got 0"):
        score(resamples=0)
    with pytest.raises(ValueError, match=r"untrained must have 2 layers and 4 modules.*3 and 4"):
        score(untrained=Operations(OPERATIONS, n_layers=3))
    with pytest.raises(ValueError, match=r"at least 2 examples per task, got 1 of 3"):
        score(task=task.index_fill(0, torch.tensor([3]), 4))
    with pytest.raises(ValueError, match=r"task must be \[example\], \(32,\), got \(32, 1\)"):
        score(task=task[:, None])
    with pytest.raises(TypeError, match=r"task must hold integers"):
        score(task=task.float())
    with pytest.raises(
        ValueError, match=r"budget must be at least 20 module applications .* got 19"
    ):
        score(budget=19)
