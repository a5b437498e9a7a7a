"""`mechanisms.check` accepts a correct attention, and names what is wrong with broken ones."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import mechanisms
from mechanisms.hooking import observed

WIDTH = 8
X = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))


class Correct(nn.Module):
    """Attention with one head: what the broken ones change one step of."""

    def __init__(self, generator=None):
        super().__init__()
        weights = torch.randn(3, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.W_Q, self.W_V, self.W_O = map(nn.Parameter, weights)
        self.hook_scores, self.hook_pattern, self.hook_z = (HookPoint() for _ in range(3))

    def forward(self, x_query, x_key, *, mask=None):
        scores = self.hook_scores((x_query @ self.W_Q @ x_key.transpose(1, 2))[:, None])
        pattern = self.hook_pattern(self.normalize(scores, mask))
        return self.mix(self.hook_z(pattern[:, 0] @ (x_key @ self.W_V)))

    def normalize(self, scores, mask):
        if mask is None:
            return scores.softmax(-1)
        dead = ~mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~mask, -torch.inf).masked_fill(dead, 0.0)
        return scores.softmax(-1).masked_fill(~mask, 0.0)

    def mix(self, z):
        return z @ self.W_O


def built(attention=Correct, seed=0):
    return attention(torch.Generator().manual_seed(seed))


class HookThatNeverFires(Correct):
    def __init__(self, generator):
        super().__init__(generator)
        self.hook_gate = HookPoint()


class HookThatShowsACopy(Correct):
    def mix(self, z):
        self.hook_z(z)
        return super().mix(z)

    def forward(self, x_query, x_key, *, mask=None):
        scores = (x_query @ self.W_Q @ x_key.transpose(1, 2))[:, None]
        self.hook_scores(scores.clone())
        pattern = self.hook_pattern(self.normalize(scores, mask))
        return super().mix(self.hook_z(pattern[:, 0] @ (x_key @ self.W_V)))


class ChangesWhatAHookReceived(Correct):
    def mix(self, z):
        return super().mix(z.mul_(2))


class DiffersWhenAllAreObserved(Correct):
    def mix(self, z):
        return super().mix(z) * (1.01 if observed(self.hook_z) else 1)


class DiffersWhenOneIsObserved(Correct):
    def mix(self, z):
        alone = observed(self.hook_z) and not observed(self.hook_pattern)
        return super().mix(z) * (1.01 if alone else 1)


class HasOtherGradientsWhenObserved(Correct):
    def mix(self, z):
        return (super().mix(z) if observed(self) else super().mix(z.detach())) + 0 * z.sum()


class KeepsTensorsOfInferenceMode(Correct):
    """For all instances, as tables of positions are kept."""

    kept = {}  # noqa: RUF012

    def mix(self, z):
        return super().mix(z) * self.kept.setdefault("scale", torch.ones(WIDTH) * 2)


class DiffersInInferenceMode(Correct):
    def mix(self, z):
        return super().mix(z) * (2 if torch.is_inference_mode_enabled() else 1)


class DropsInEvaluationMode(Correct):
    def mix(self, z):
        return super().mix(dropout(z, 0.5))


class OverwritesItsInputs(Correct):
    def forward(self, x_query, x_key, *, mask=None):
        return super().forward(x_query, x_key.mul_(2), mask=mask)


class IsNan(Correct):
    def mix(self, z):
        return super().mix(z).log()


class IsInfinite(Correct):
    def mix(self, z):
        return super().mix(z) + torch.inf


class NormalisesOverTheBatch(Correct):
    def mix(self, z):
        return super().mix(z - z.mean(0))


class SeesThePreviousExample(Correct):
    def mix(self, z):
        return super().mix(z + torch.cat([torch.zeros_like(z[:1]), z[:-1]]))


class AveragesTheExamples(Correct):
    def mix(self, z):
        return super().mix(z).mean(0)


class HasAWeightWithoutUse(Correct):
    def __init__(self, generator):
        super().__init__(generator)
        self.b_O = nn.Parameter(torch.zeros(WIDTH))


class HasGradientsThatAreNotFinite(Correct):
    def mix(self, z):
        return super().mix(z) + (z - z).sqrt().sum() if self.training else super().mix(z)


class IgnoresTheMask(Correct):
    def normalize(self, scores, mask):
        return super().normalize(scores, None)


class AttendsEverywhereWhereAllIsMasked(Correct):
    def normalize(self, scores, mask):
        return scores.softmax(-1) if mask is None else scores.masked_fill(~mask, -1e9).softmax(-1)


class IsNanWhereAllIsMasked(Correct):
    def normalize(self, scores, mask):
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) if mask is not None else scores


class HasNanGradientsWhereAllIsMasked(Correct):
    def normalize(self, scores, mask):
        weights = scores.exp() if mask is None else scores.exp() * mask
        return (weights / weights.sum(-1, keepdim=True)).nan_to_num(0.0)


class IgnoresTheMaskWhenObserved(Correct):
    def normalize(self, scores, mask):
        return super().normalize(scores, None if observed(self.hook_z) else mask)


class ShowsAPatternWithoutMask(Correct):
    def forward(self, x_query, x_key, *, mask=None):
        scores = self.hook_scores((x_query @ self.W_Q @ x_key.transpose(1, 2))[:, None])
        masked = torch.tensor(False) if mask is None else ~mask
        pattern = self.normalize(scores, mask).masked_fill(masked, 1.0)
        pattern = self.hook_pattern(pattern).masked_fill(masked, 0.0)
        return self.mix(self.hook_z(pattern[:, 0] @ (x_key @ self.W_V)))


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (HookThatNeverFires, "hook_gate must fire"),
        (HookThatShowsACopy, "changes at hook_scores .* must reach the output"),
        (ChangesWhatAHookReceived, "what hooks at hook_z received is changed in place"),
        (DiffersWhenAllAreObserved, "the output with all hooks differs by"),
        (DiffersWhenOneIsObserved, "the output with a hook at hook_z alone differs by"),
        (HasOtherGradientsWhenObserved, "with all hooks, the gradient of W_Q differs by"),
        (KeepsTensorsOfInferenceMode, "training fails after a call in inference mode"),
        (DiffersInInferenceMode, "the output outside of inference mode differs by"),
        (DropsInEvaluationMode, "in evaluation mode, the output of a second call differs by"),
        (OverwritesItsInputs, r"inputs\[0\] is changed in place"),
        (IsNan, "the output has [0-9]+ values that are NaN or inf"),
        (IsInfinite, "the output has 120 values that are NaN or inf"),
        (NormalisesOverTheBatch, "the output of example 0, passed alone, differs by"),
        (SeesThePreviousExample, "the output of example 2, passed alone, differs by"),
        (AveragesTheExamples, r"\[example, ...\] for 3 examples, got shape \(5, 8\)"),
        (HasAWeightWithoutUse, "no gradient reaches the parameters b_O"),
        (HasGradientsThatAreNotFinite, "in training mode, the gradients of W_Q, W_V are not"),
        (IgnoresTheMask, "unobserved, the output after a change of masked keys differs by"),
        (AttendsEverywhereWhereAllIsMasked, "the output after a change of masked keys differs"),
        (IsNanWhereAllIsMasked, "output is NaN or inf where a query may attend to nothing"),
        (HasNanGradientsWhereAllIsMasked, "attend to nothing, the gradients of W_Q are not finite"),
        (IgnoresTheMaskWhenObserved, "observed, the output after a change of masked keys differs"),
        (ShowsAPatternWithoutMask, "hook_pattern is not 0 where the mask is False"),
    ],
)
def test_each_rule_is_checked(attention, message):
    with pytest.raises(ValueError, match=message) as caught:
        mechanisms.check(built(attention), (X, X))
    assert str(caught.value).startswith(f"{attention.__name__} must keep the rules")


def test_a_correct_component_stays_as_it_is():
    attention = built().train()
    before = copy.deepcopy(attention.state_dict())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert mechanisms.check(attention, (X, X.clone()), build=Correct) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in attention.state_dict().items())
    assert attention.training
    assert attention.W_Q.grad is None
    assert not observed(attention)


def test_hooks_may_be_optional():
    mechanisms.check(built(HookThatNeverFires), (X, X), optional=["hook_g*"])
    mechanisms.check(built(HookThatShowsACopy), (X, X), optional=["hook_scores"])
    with pytest.raises(ValueError, match=r"got 'hook_gates'; nearest: \['hook_gate'"):
        mechanisms.check(built(HookThatNeverFires), (X, X), optional=["hook_gates"])


def test_weights_that_let_nothing_through_at_the_start_are_no_error():
    attention = built()
    nn.init.zeros_(attention.W_O)
    mechanisms.check(attention, (X, X))


class HasAnswersThatDoNotExist(Correct):
    def mix(self, z):
        return super().mix(z) + torch.where(torch.arange(WIDTH) > 5, -torch.inf, 0.0)


class SeesOthersToo(HasAnswersThatDoNotExist):
    def mix(self, z):
        return super().mix(z - z.mean(0))


class ChoosesAColumn(Correct):
    """Its first column is everyone's, until a hook says otherwise."""

    def __init__(self, generator=None):
        super().__init__(generator)
        self.hook_choice = HookPoint()

    def mix(self, z):
        choice = self.hook_choice(torch.zeros(z.shape[:2], dtype=torch.int64))
        return super().mix(z).take_along_dim(choice[..., None], -1)


class IgnoresTheChoice(ChoosesAColumn):
    def mix(self, z):
        self.hook_choice(torch.zeros(z.shape[:2], dtype=torch.int64))
        return Correct.mix(self, z)


def test_some_logits_may_be_minus_infinite_and_numbers_be_chosen():
    mechanisms.check(built(HasAnswersThatDoNotExist), (X, X), build=HasAnswersThatDoNotExist)
    with pytest.raises(ValueError, match="passed alone, differs by"):
        mechanisms.check(built(SeesOthersToo), (X, X))
    mechanisms.check(built(ChoosesAColumn), (X, X))
    with pytest.raises(ValueError, match="changes at hook_choice"):
        mechanisms.check(built(IgnoresTheChoice), (X, X))


def drawn_from_the_global_state(generator):
    return Correct()


def drawn_from_a_seed_of_its_own(generator):
    return built(seed=7)


class KeepsAWeightOutside(Correct):
    def __init__(self, generator=None):
        super().__init__(generator)
        self.scale = torch.rand(WIDTH, generator=generator)

    def mix(self, z):
        return super().mix(z * self.scale)


class IsWider(Correct):
    def __init__(self, generator=None):
        super().__init__(generator)
        self.W_Q = nn.Parameter(torch.randn(WIDTH, WIDTH + 1, generator=generator))


@pytest.mark.parametrize(
    ("component", "build", "message"),
    [
        (Correct, drawn_from_the_global_state, "build draws from the global random state"),
        (Correct, drawn_from_the_global_state, "different weights W_O, W_Q, W_V"),
        (Correct, drawn_from_a_seed_of_its_own, "same weights for generators of different seeds"),
        (KeepsAWeightOutside, KeepsAWeightOutside, "the state_dict loaded .* differs by"),
        (Correct, IsWider, "must take the component's state_dict: .*size mismatch for W_Q"),
    ],
)
def test_each_rule_about_weights_is_checked(component, build, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        mechanisms.check(built(component), (X, X), build=build)


class Model(HookedRootModule):
    def __init__(self, *, complete):
        super().__init__()
        self.attn = built()
        if complete:
            self.setup()

    def forward(self, x):
        return self.attn(x, x)


def test_a_model_has_its_hook_points_in_hook_dict():
    mechanisms.check(Model(complete=True), X)
    with pytest.raises(ValueError, match=r"hook_dict must .* attn\.hook_scores.*: call setup"):
        mechanisms.check(Model(complete=False), X)


TRANSFORMER = mechanisms.TransformerConfig(
    d_input=WIDTH,
    d_output=3,
    d_model=WIDTH,
    n_layers=1,
    attention=mechanisms.AttentionConfig(n_heads=2, d_head=4),
    feed_forward=mechanisms.FeedForwardConfig(d_mlp=8),
    max_distance=5,
)


def test_a_model_is_the_same_after_saving_and_loading():
    model = mechanisms.Transformer(TRANSFORMER)
    mechanisms.check(model, X)
    other = replace(TRANSFORMER.feed_forward, activation="relu")
    model.blocks[0].mlp.config = other
    with pytest.raises(ValueError, match="the output after save and load differs by"):
        mechanisms.check(model, X)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (X[:1], r"2 or more, as their first dim, got shapes \(1, 5, 8\)"),
        ((X, X[:2]), r"got shapes \(3, 5, 8\), \(2, 5, 8\)"),
        (torch.tensor(1.0), r"got shapes \(\)"),
    ],
)
def test_inputs_without_examples_to_compare_are_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        mechanisms.check(built(), inputs)


def test_a_component_with_hooks_is_refused():
    attention = built()
    attention.hook_z.add_hook(lambda z, hook: z)
    with pytest.raises(ValueError, match="component must have no hooks"):
        mechanisms.check(attention, (X, X))


def test_an_error_in_the_component_names_the_hook():
    class Strict(Correct):
        def mix(self, z):
            if observed(self.hook_z) and not z.any():
                raise RuntimeError("z is 0")
            return z @ self.W_O.detach() * 0

    with pytest.raises(RuntimeError, match="z is 0") as caught:
        mechanisms.check(built(Strict), (X, X))
    assert caught.value.__notes__ == ["The component was called with hooks at hook_z"]


def test_an_output_that_is_no_tensor_is_refused():
    class Named(Correct):
        def mix(self, z):
            return {"z": z}

    with pytest.raises(TypeError, match="must be a tensor or a tuple of them, got dict"):
        mechanisms.check(built(Named), (X, X))
