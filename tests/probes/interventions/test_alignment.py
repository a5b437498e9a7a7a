"""Alignment in a model whose subspaces are known: a and b in two rotated planes, added modulo 4."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from probes import Swaps, Vector, align, swap

N, D = 4, 12


class Adds(HookedRootModule):
    """Answers (a + b) modulo 4 from a state in which both are one-hot, under a rotation.

    With `knows=False`, what it writes and what it reads are rotated differently. The state is at
    one position of a sequence, in one of two heads, after the second of two steps.
    """

    def __init__(self, *, knows=True, width=D):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        turns = [
            torch.linalg.qr(torch.randn(width, width, generator=generator)).Q for _ in range(2)
        ]
        self.write = torch.nn.Parameter(turns[0])
        self.read = torch.nn.Parameter(turns[0] if knows else turns[1])
        self.hook_state, self.hook_heads = HookPoint(), HookPoint()
        self.setup()

    def forward(self, inputs, pos):
        a, b = torch.nn.functional.one_hot(inputs, N).float().unbind(1)
        noise = torch.sin(7 * (inputs.sum(1, keepdim=True) + torch.arange(len(self.write) - 2 * N)))
        state = torch.cat([a, b, noise], dim=1) @ self.write.T
        sequence = torch.zeros(len(state), 5, 2, len(self.write))
        rows = torch.arange(len(state))
        sequence[rows, pos, 1] = state
        sequence = self.hook_heads(sequence)
        state = self.hook_state(0 * sequence[rows, pos, 1])
        state = self.hook_state(state + sequence[rows, pos, 1])
        a, b = (state @ self.read)[:, : 2 * N].unflatten(1, (2, N)).unbind(1)
        turned = torch.stack([b.roll(step, 1) for step in range(N)], dim=1)  # [batch, a, answer]
        return torch.einsum("na,nac->nc", a, turned)


class Task:
    """The causal model of `Adds`."""

    def batch(self, seed, size=600):
        generator = torch.Generator().manual_seed(seed)
        pair = torch.randint(N, (size, 2), generator=generator)
        pos = torch.randint(5, (size,), generator=generator)
        return self.of(pair, pos)

    def of(self, pair, pos):
        targets = pair.sum(1, keepdim=True) % N
        latents = {"a": pair[:, 0], "b": pair[:, 1]}
        mask = torch.ones_like(targets, dtype=torch.bool)
        return SimpleNamespace(inputs=(pair, pos), targets=targets, mask=mask, latents=latents)

    def counterfactual(self, batch, latents):
        both = batch.latents | dict(latents)
        return self.of(torch.stack([both["a"], both["b"]], 1), batch.inputs[1])


def pairs_of(seed, size=600):
    task = Task()
    base, source = task.batch(2 * seed, size), task.batch(2 * seed + 1, size)
    return swap(task, base, source, {name: {name: source.latents[name]} for name in "ab"})


def run(model=None, *, ranks=(3,), **changes):
    arguments = {
        "sites": {"state": Vector("hook_state", step=1)},
        "logits": lambda output: output[:, None],
        "epochs": 12,
        "learning_rate": 0.03,
        "resamples": 200,
    } | changes
    fit, test = arguments.pop("fit", pairs_of(0)), arguments.pop("test", {"test": pairs_of(1)})
    return align(model or Adds(), fit, test, ranks=ranks, **arguments)


@pytest.fixture(scope="module")
def result():
    return run(ranks=(1, 3), untrained=Adds(knows=False))


def test_the_planted_subspaces_are_found(result):
    accuracy = result["accuracy"].sel(split="test", site="state", rank=3, pairs="changed")
    assert (accuracy.sel(control="learned") > 0.97).all()
    # One dimension cannot hold four values.
    one = result["accuracy"].sel(split="test", site="state", rank=1, pairs="changed")
    assert (one.sel(control="learned") < 0.8).all()
    # The centred one-hot codes span three dimensions, in the columns of the rotation.
    basis = torch.from_numpy(result["basis"].sel(site="state", rank=3).to_numpy()).float()
    planes = Adds().write.detach()[:, : 2 * N].unflatten(1, (2, N))
    for number in range(2):
        plane = planes[:, number] - planes[:, number].mean(1, keepdim=True)
        within = torch.linalg.svdvals(torch.linalg.qr(plane).Q[:, :3].T @ basis[number])
        assert (within > 0.9).all()
    np.testing.assert_allclose(basis[0].T @ basis[0], np.eye(3), atol=1e-4)


def test_controls_are_what_they_are_called(result):
    accuracy = result["accuracy"].sel(split="test", site="state", rank=3, pairs="changed")
    swaps = pairs_of(1)
    # Without an exchange the answer is the base's, and with all of it the source's.
    assert (accuracy.sel(control="none") == 0).all()
    a, b = (swaps.base[0][:, i] for i in range(2))
    source = swaps.source[0].sum(1) % N
    for variable, exchanged in {
        "a": swaps.source[0][:, 0] + b,
        "b": a + swaps.source[0][:, 1],
    }.items():
        changed = exchanged % N != (a + b) % N
        expected = (source == exchanged % N)[changed].float().mean()
        assert accuracy.sel(control="whole", variable=variable) == pytest.approx(float(expected))
        assert (
            result["trials"].sel(split="test", pairs="changed", variable=variable) == changed.sum()
        )
    for control in ("random", "another variable", "untrained"):
        assert (accuracy.sel(control=control) < 0.5).all()
    above = result["above_low"].sel(split="test", site="state", rank=3, pairs="changed")
    assert (above.drop_sel(control="learned") > 0.3).all()
    assert (result["above"].sel(control="learned") == 0).all()
    # Its answers are not the bases', so that some are right without any exchange.
    guesses = Adds(knows=False)(*swaps.base).argmax(1)
    for variable, wanted in swaps.answers.items():
        changed = (wanted != swaps.own)[:, 0]
        expected = float((guesses == wanted[:, 0])[changed].float().mean())
        found = accuracy.sel(control="untrained, none", variable=variable)
        assert found == pytest.approx(expected)
    everything = result["accuracy"].sel(split="test", rank=3, site="state", pairs="all")
    # The unchanged pairs are hits without any exchange.
    share = 1 - result["trials"].sel(pairs="changed") / result["trials"].sel(pairs="all")
    np.testing.assert_allclose(everything.sel(control="none"), share.sel(split="test"))
    assert all(result[name].attrs["long_name"] for name in result.variables)


def test_a_model_that_does_not_know_has_no_such_subspace():
    accuracy = run(Adds(knows=False))["accuracy"].sel(pairs="changed", control="learned")
    assert (accuracy < 0.6).all()


def test_positions_differ_by_example_and_heads_are_entries(result):
    swaps = {
        seed: Swaps(**vars(pairs_of(seed)) | {
            "base_pos": pairs_of(seed).base[1], "source_pos": pairs_of(seed).source[1],
        })
        for seed in (0, 1)
    }  # fmt: skip
    sites = {
        "head 1": Vector("hook_heads", np.s_[:, 1]),
        "head 0": Vector("hook_heads", np.s_[:, 0]),
    }
    options = {"sites": sites, "logits": lambda output: output[:, None], "ranks": [3]}
    options |= {"epochs": 12, "learning_rate": 0.03, "resamples": 200}
    found = align(Adds(), swaps[0], {"test": swaps[1]}, **options)
    of_head = found["accuracy"].sel(split="test", pairs="changed", rank=3)
    # The same vector as that of the state.
    here = result["accuracy"].sel(split="test", pairs="changed", rank=3, site="state")
    kept = ["learned", "whole", "none", "pca", "another variable"]
    np.testing.assert_allclose(
        of_head.sel(site="head 1", control=kept), here.sel(control=kept), atol=0.02
    )
    assert (of_head.sel(site="head 0") == 0).all()
    # At the base's positions the sources' vectors are mostly zero.
    same = {seed: Swaps(**vars(pairs) | {"source_pos": None}) for seed, pairs in swaps.items()}
    misplaced = align(Adds(), same[0], {"test": same[1]}, **options)
    assert (
        misplaced["accuracy"].sel(site="head 1", control="learned", pairs="changed") < 0.5
    ).all()


def test_answers_that_are_missing_do_not_count():
    pairs = pairs_of(1, 100)
    answers = {name: answer.clone() for name, answer in pairs.answers.items()}
    answers["a"][:60] = -1
    found = run(test={"test": Swaps(**vars(pairs) | {"answers": answers})})
    trials = found["trials"].sel(split="test", pairs="all")
    assert trials.to_numpy().tolist() == [40, 100]
    rest = Swaps(
        tuple(part[60:] for part in pairs.base),
        tuple(part[60:] for part in pairs.source),
        {name: answer[60:] for name, answer in answers.items()},
        pairs.own[60:],
    )
    alone = run(test={"test": rest})
    np.testing.assert_allclose(
        found["accuracy"].sel(variable="a"), alone["accuracy"].sel(variable="a")
    )


def test_the_model_is_as_it_was_and_the_result_repeats():
    model = Adds().train()
    model.read.requires_grad_(False)
    first = run(model, ranks=[2])
    assert model.training
    assert not model.read.requires_grad
    assert model.write.requires_grad
    assert model.write.grad is None
    assert first.equals(run(ranks=[2]))
    assert not first["basis"].equals(run(ranks=[2], seed=1)["basis"])
    assert not model.list_hooks()


def test_swaps_take_counterfactuals_of_a_task():
    swaps = pairs_of(3, 50)
    (base, _), (source, _) = swaps.base, swaps.source
    assert (swaps.own[:, 0] == base.sum(1) % N).all()
    assert (swaps.answers["a"][:, 0] == (source[:, 0] + base[:, 1]) % N).all()
    assert len(swaps) == 50

    class Masked(Task):
        def counterfactual(self, batch, latents):
            wanted = super().counterfactual(batch, latents)
            wanted.mask[:10] = False
            return wanted

    base, source = Task().batch(0, 20), Task().batch(1, 20)
    base.mask[-5:] = False
    answers = swap(Masked(), base, source, {"a": {"a": source.latents["a"]}}).answers["a"]
    assert ((answers == -1)[:, 0] == torch.tensor([True] * 10 + [False] * 5 + [True] * 5)).all()


def test_invalid_input_is_refused():
    with pytest.raises(ValueError, match=r"sites\['s'\] must have a step, 0 to 1, since"):
        run(sites={"s": Vector("hook_state")})
    with pytest.raises(RuntimeError, match=r"sites\['s'\] must have a step below 2, the number"):
        run(sites={"s": Vector("hook_state", step=2)})
    with pytest.raises(ValueError, match=r"sites\['s'\] must be one hook, got the glob 'hook_\*'"):
        run(sites={"s": Vector("hook_*")})
    with pytest.raises(KeyError, match="nearest"):
        run(sites={"s": Vector("hook_stat")})
    with pytest.raises(
        ValueError, match="ranks must be at most 12, the size of the vector 'state'"
    ):
        run(ranks=[13])
    with pytest.raises(ValueError, match="ranks must be at least 1, got"):
        run(ranks=[0])
    with pytest.raises(ValueError, match="sites must not be empty"):
        run(sites={})
    with pytest.raises(ValueError, match="logits must return"):
        run(logits=lambda output: output.argmax(1))
    with pytest.raises(ValueError, match=r"answers of the shape \(600, 1\), got answers \(600,\)"):
        run(logits=lambda output: output)
    outside = {"state": Vector("hook_state", np.s_[:, 99], step=1)}
    with pytest.raises(
        ValueError, match=r"entries must be those of the activation, .* 'hook_state', got"
    ):
        run(sites=outside)
    other = pairs_of(1)
    large = Swaps(**vars(other) | {"answers": {"a": other.own + 9, "b": other.own}})
    with pytest.raises(ValueError, match="answers must be below the 4 classes of logits, got 12"):
        run(fit=large)
    only = Swaps(**vars(other) | {"answers": {"a": other.answers["a"]}})
    with pytest.raises(
        KeyError, match=r"test\['test'\] must have the variables of fit, a, b, got a"
    ):
        run(test={"test": only})
    with pytest.raises(ValueError, match=r"answers of 'a' must have the shape of own, \(600,\) or"):
        Swaps(other.base, other.source, {"a": other.own[:5]}, other.own)
    with pytest.raises(TypeError, match=r"answers of 'a' must be integers, got torch\.float32"):
        Swaps(other.base, other.source, {"a": other.own.float()}, other.own)
    with pytest.raises(ValueError, match="source must have the 600 examples of base, got 10"):
        Swaps(other.base, other.source[0][:10], {"a": other.own}, other.own)
    with pytest.raises(ValueError, match="source_pos must come with base_pos"):
        Swaps(other.base, other.source, {"a": other.own}, other.own, source_pos=other.own[:, 0])


class HasState(HookedRootModule):
    def __init__(self):
        super().__init__()
        self.hook_state = HookPoint()
        self.setup()


class Repeats(HasState):
    """Answers (a + b) modulo 4 from a state; a batch with an a of 3 takes a second step."""

    def forward(self, inputs, pos):
        answer = torch.nn.functional.one_hot(inputs.sum(1) % N, N).float()
        for _ in range(1 + int((inputs[:, 0] == 3).any())):
            state = self.hook_state(answer)
        return state


def test_the_number_of_firings_is_that_of_each_batch():
    pairs = pairs_of(0)
    # The first example alone takes one step.
    pairs.base[0][0], few = 0, {**vars(pairs), "base": (pairs.base[0].clamp(max=2), pairs.base[1])}
    settings = {"logits": lambda output: output[:, None], "ranks": [1], "epochs": 1}
    once, second = {"s": Vector("hook_state")}, {"s": Vector("hook_state", step=1)}
    with pytest.raises(ValueError, match=r"must have a step, 0 to 1, since 'hook_state' fires 2"):
        align(Repeats(), pairs, {"test": pairs}, sites=once, **settings)
    with pytest.raises(RuntimeError, match=r"'hook_state' must fire at step 1 in each batch"):
        align(Repeats(), pairs, {"test": Swaps(**few)}, sites=second, **settings)
    few |= {"source": (pairs.source[0].clamp(max=2), pairs.source[1])}
    with pytest.raises(RuntimeError, match=r"'hook_state' must fire once in each batch"):
        align(Repeats(), Swaps(**few), {"test": pairs}, sites=once, **settings)


class InHalfPrecision(HasState):
    """Answers (a + b) modulo 4 from a state of both in bfloat16."""

    def forward(self, inputs, pos):
        one_hot = torch.nn.functional.one_hot(inputs, N).flatten(1).bfloat16()
        a, b = self.hook_state(one_hot).unflatten(1, (2, N)).unbind(1)
        turned = torch.stack([b.roll(step, 1) for step in range(N)], dim=1)
        return torch.einsum("na,nac->nc", a, turned)


def test_subspaces_of_half_precision_are_found():
    accuracy = run(InHalfPrecision(), sites={"s": Vector("hook_state")})["accuracy"]
    accuracy = accuracy.sel(pairs="changed").squeeze()
    assert (accuracy.sel(control="learned") > 0.95).all()
    assert (accuracy.sel(control=["none", "random"]) < 0.6).all()
