import math
from itertools import product

import pytest
import torch
from torch.nn.functional import one_hot

import mechanisms
from mechanisms import (
    Monolithic,
    MonolithicConfig,
    OperationPoolConfig,
    all_paths_loss,
    sampled_path_loss,
)
from mechanisms.serialization import config_from_json, config_to_json
from tests.mechanisms.modular.networks import ROUTERS, inputs, network

BOTTLENECKS = ["oracle", "attention", "none"]


def run_path(path, model, x):
    """The answers along a path, set by hooks on the choice of every layer."""

    def choose(module):
        return lambda choice, hook: one_hot(torch.tensor(module), choice.shape[-1]).to(choice)

    hooks = [(f"layers.{i}.hook_module_choice", choose(module)) for i, module in enumerate(path)]
    return model.run_with_hooks(x, fwd_hooks=hooks)[:, 0]


@pytest.mark.parametrize("bottleneck", BOTTLENECKS)
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_in_evaluation_the_module_with_the_highest_score_is_applied(router, bottleneck):
    model, x = network(router, functional_bottleneck=bottleneck), inputs()
    with torch.no_grad():
        answers = model(x)[:, 0]
        cached_answers, cache = model.run_with_cache(x)
        paths, _ = model.all_paths(x)
    assert torch.allclose(cached_answers[:, 0], answers, atol=1e-5)
    chosen = []
    for layer in range(2):
        scores = cache[f"layers.{layer}.hook_module_scores"]
        if f"layers.{layer}.hook_selected_variable" in cache:
            selected = cache[f"layers.{layer}.hook_selected_variable"].argmax(-1)
            scores = scores[torch.arange(20), selected][:, None]
        # Among the scores R of an input the largest, of any variable and module.
        rows = [max(range(R.numel()), key=R.flatten().__getitem__) % 3 for R in scores]
        chosen.append(torch.tensor(rows))
    for layer in range(2):
        choice = cache[f"layers.{layer}.hook_module_choice"]
        assert torch.equal(choice, one_hot(chosen[layer], 3).float())
        assert torch.equal(cache[f"layers.{layer}.hook_expert_indices"][:, 0], chosen[layer])
        probs = cache[f"layers.{layer}.hook_module_probs"]
        assert torch.equal(cache[f"layers.{layer}.hook_expert_weights"], probs)
        out = cache[f"layers.{layer}.hook_module_out"]
        assert torch.allclose(cache[f"layers.{layer}.hook_result"], (choice * out).sum(-1))
    path = 3 * chosen[0] + chosen[1]
    assert torch.allclose(paths.gather(1, path[:, None])[:, 0], answers, atol=1e-5)


@pytest.mark.parametrize("bottleneck", BOTTLENECKS)
def test_overriding_the_choice_takes_every_path(bottleneck):
    model, x = network(functional_bottleneck=bottleneck), inputs()
    with torch.no_grad():
        paths, _ = model.all_paths(x)
        for number, path in enumerate(product(range(3), repeat=2)):
            assert torch.allclose(run_path(path, model, x), paths[:, number], atol=1e-5)


def test_advancing_layer_by_layer_gives_all_paths():
    model, x = network(n_layers=3), inputs()
    with torch.no_grad():
        partial = model.begin(x)
        for layer in range(3):
            partial = model.advance(x, layer, partial).flatten(1, 2)
        paths, probabilities = model.all_paths(x)
    assert partial.shape == (20, 27, 1)
    assert torch.equal(partial[..., 0], paths)
    assert torch.allclose(probabilities.sum(-1), torch.ones(20, 3))


def test_the_oracle_bottleneck_passes_the_operands_of_the_task():
    model, x = network(n_layers=3), inputs()
    _, cache = model.run_with_cache(x)
    assert torch.equal(cache["layers.0.hook_operands"][:, 0], x[:, :2, 0])
    for layer in (1, 2):
        operands = cache[f"layers.{layer}.hook_operands"][:, 0]
        assert torch.equal(operands[:, 0], cache[f"layers.{layer - 1}.hook_result"])
        assert torch.equal(operands[:, 1], x[:, 0, 0])


def test_without_a_bottleneck_modules_receive_all_features():
    model, x = network(functional_bottleneck="none"), inputs()
    _, cache = model.run_with_cache(x)
    operands = cache["layers.1.hook_operands"]
    assert operands.shape == (20, 1, 21)
    assert torch.equal(operands[:, 0, :20], x.flatten(1))
    assert torch.equal(operands[:, 0, 20], cache["layers.0.hook_result"])


def test_slots_choose_numbers_by_the_modules_signature():
    model, x = network(functional_bottleneck="attention"), inputs()
    _, cache = model.run_with_cache(x)
    slots, embed = model.slots, cache["hook_embed"]
    for layer in range(2):
        choice = cache[f"layers.{layer}.hook_operand_choice"]
        result = cache["layers.0.hook_result"] if layer else torch.zeros(20)
        values = torch.cat([x[..., 0], result[:, None]], dim=1)
        for module, slot in product(range(3), range(2)):
            query = slots.signatures[module] @ slots.W_slot[slot]
            keys = [embed[:, n] @ slots.W_C for n in range(5)]
            if layer:
                keys.append(slots.result_key.expand(20, -1))
            best = torch.stack([key @ query for key in keys], dim=1).argmax(-1)
            assert torch.equal(choice[:, module, slot].argmax(-1), best)
            expected = values.gather(1, best[:, None])[:, 0]
            operand = cache[f"layers.{layer}.hook_operands"][:, module, slot]
            assert torch.allclose(operand, expected)
    only_results = torch.zeros(20, 3, 2, 6)
    only_results[..., 5] = 1
    changed = model.run_with_hooks(
        x, fwd_hooks=[("layers.1.hook_operand_choice", lambda c, hook: only_results)]
    )
    assert not torch.allclose(changed, model(x))


def test_the_highest_score_and_the_most_probable_module_are_two_choices():
    # Module 0 has the highest score, module 1 the largest sum of exponentials.
    scores = torch.tensor([[2.0, 1.5, 0.0], [0.0, 1.5, 0.0], *[[0.0, 1.5, 0.0]] * 3])
    hook = [("layers.0.hook_module_scores", lambda old, hook: scores.expand_as(old))]
    for choice, expected in (("pair", 0), ("module", 1)):
        model = network(choice=choice)
        with model.hooks(fwd_hooks=hook):
            _, cache = model.run_with_cache(inputs())
        assert (cache["layers.0.hook_expert_indices"] == expected).all()
        assert torch.allclose(
            cache["layers.0.hook_module_probs"], (scores.exp().sum(0) / scores.exp().sum())[None]
        )
    model, x = network(n_modules=10), inputs(500)
    sums = network(n_modules=10, choice="module")
    chosen, most_probable = (
        one.run_with_cache(x)[1]["layers.0.hook_expert_indices"] for one in (model, sums)
    )
    assert 0.05 < (chosen != most_probable).float().mean() < 0.6


def test_a_file_without_the_new_settings_takes_the_highest_score():
    text = config_to_json(network(choice="module").config)
    for name in ("choice", "input_encoder"):
        del text[name]
    config = config_from_json(text)
    assert (config.choice, config.input_encoder) == ("pair", "linear")


@pytest.mark.parametrize("choice", ["pair", "module"])
@pytest.mark.parametrize("name", ["cross", "cross, bottleneck", "encoder"])
def test_modules_that_a_hook_excludes_are_not_chosen(name, choice):
    model, x = network(ROUTERS[name], choice=choice), inputs()

    def exclude(scores, hook):
        return scores.masked_fill(torch.tensor([True, False, True]), -torch.inf)

    hooks = [(f"layers.{layer}.hook_module_scores", exclude) for layer in range(2)]
    for training in (False, True):
        answers = model.train(training).run_with_hooks(x, fwd_hooks=hooks)
        assert torch.allclose(answers[:, 0], run_path((1, 1), model, x), atol=1e-6)


def test_variables_are_encoded_by_a_perceptron_or_a_linear_map():
    x = inputs()
    model = network(input_encoder="mlp")
    _, cache = model.run_with_cache(x)
    linear = network()
    for example, variable in product(range(20), range(5)):
        hidden = [
            max(0.0, (x[example, variable] @ model.W_E[:, unit] + model.b_E[unit]).item())
            for unit in range(8)
        ]
        expected = [
            sum(h * w for h, w in zip(hidden, column, strict=True)) + b
            for column, b in zip(model.W_H.T.tolist(), model.b_H.tolist(), strict=True)
        ]
        assert cache["hook_embed"][example, variable].tolist() == pytest.approx(expected, abs=1e-5)
    _, cache = linear.run_with_cache(x)
    assert torch.allclose(cache["hook_embed"], x @ linear.W_E + linear.b_E, atol=1e-6)


def run_and_keep(model, x, **settings):
    """The answer, and what the first layer computes on the way, with gradients after backward."""
    kept = {}

    def hook(values, hook):
        if values.requires_grad:
            values.retain_grad()
        kept[hook.name.removeprefix("layers.0.hook_")] = values

    names = [f"layers.0.hook_{name}" for name in ("module_scores", "module_choice", "module_out")]
    hooks = [(name, hook) for name in names]
    return model.run_with_hooks(x, fwd_hooks=hooks, **settings), kept


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_pairs_are_sampled_by_the_gumbel_softmax_over_all_scores(temperature):
    """The choice and its gradient, compared with a sample over R of one input, written out."""
    model, x = network(n_layers=1).train(), inputs(1)
    torch.manual_seed(0)
    answer, kept = run_and_keep(model, x, temperature=temperature)
    answer.sum().backward()
    torch.manual_seed(0)
    noise = -torch.empty(1, 15).exponential_().log()
    R = kept["module_scores"].detach().requires_grad_()
    soft = ((R.flatten(1) + noise) / temperature).softmax(-1).unflatten(1, (5, 3))
    chosen = soft.flatten(1).argmax(-1) % 3
    assert torch.equal(kept["module_choice"].argmax(-1), chosen)
    out = kept["module_out"].detach()
    assert torch.allclose(answer[0, 0], out[0, chosen[0]])
    (soft.sum(1) * out).sum().backward()
    assert torch.allclose(kept["module_scores"].grad, R.grad, atol=1e-5)


@pytest.mark.parametrize("name", ["cross, bottleneck", "encoder, bottleneck", "structural oracle"])
def test_the_selected_variable_is_one_hot_and_can_be_changed(name):
    model, x = network(ROUTERS[name], seed=3), inputs()
    _, cache = model.run_with_cache(x)
    selected = cache["layers.0.hook_selected_variable"]
    assert torch.equal(selected.sum(-1), torch.ones(20))
    if name == "structural oracle":
        assert selected.argmax(-1).unique().tolist() == [2]
    scores = cache["layers.0.hook_module_scores"]
    expected = scores[torch.arange(20), selected.argmax(-1)].softmax(-1)
    assert torch.allclose(cache["layers.0.hook_module_probs"], expected)
    last_variable = one_hot(torch.full((20,), 4), 5).float()
    with model.hooks(
        fwd_hooks=[("layers.0.hook_selected_variable", lambda p, hook: last_variable)]
    ):
        _, changed = model.run_with_cache(x)
    assert torch.allclose(changed["layers.0.hook_module_probs"], scores[:, 4].softmax(-1))


def test_without_the_bottleneck_one_softmax_runs_over_variables_and_modules():
    model, x = network(), inputs()
    _, cache = model.run_with_cache(x)
    scores = cache["layers.1.hook_module_scores"]
    assert scores.shape == (20, 5, 3)
    flat = scores.flatten(1).softmax(-1).unflatten(1, (5, 3))
    assert torch.allclose(cache["layers.1.hook_module_probs"], flat.sum(1), atol=1e-6)


@pytest.mark.parametrize("choice", ["pair", "module"])
@pytest.mark.parametrize("selection", ["hard", "soft", "top_k"])
@pytest.mark.parametrize("name", ["hook_module_scores", "hook_module_probs", "hook_expert_weights"])
def test_changed_scores_and_probabilities_change_the_answer(selection, name, choice):
    top_k = 2 if selection == "top_k" else None
    model = network(selection=selection, top_k=top_k, choice=choice)
    x = inputs()
    reversed_order = [(f"layers.0.{name}", lambda values, hook: values.flip(-1).square())]
    assert not torch.allclose(model.run_with_hooks(x, fwd_hooks=reversed_order), model(x))


def test_chosen_indices_can_be_changed():
    model, x = network(), inputs()
    hooks = [(f"layers.{i}.hook_expert_indices", lambda c, hook: 0 * c + 2) for i in range(2)]
    assert torch.allclose(
        model.run_with_hooks(x, fwd_hooks=hooks)[:, 0], run_path((2, 2), model, x), atol=1e-6
    )


def test_soft_and_top_k_selection_mix_modules():
    x = inputs()
    soft, cache = network(selection="soft", n_layers=1, router=ROUTERS["encoder"]).run_with_cache(x)
    weights, outs = (cache[f"layers.0.hook_{name}"] for name in ("expert_weights", "module_out"))
    assert torch.allclose(soft[:, 0], (weights * outs).sum(-1), atol=1e-6)
    top, cache = network(
        selection="top_k", top_k=2, n_layers=1, router=ROUTERS["encoder"]
    ).run_with_cache(x)
    values, order = weights.sort(-1, descending=True)
    share = values[:, :2] / values[:, :2].sum(-1, keepdim=True)
    assert torch.allclose(top[:, 0], (share * outs.gather(1, order[:, :2])).sum(-1), atol=1e-6)
    assert torch.equal(cache["layers.0.hook_expert_indices"], order[:, :2])


def test_modules_without_probability_have_no_part_in_the_answer():
    model = network(selection="top_k", top_k=2, n_layers=1, router=ROUTERS["encoder"])
    zeroed = model.run_with_hooks(
        inputs(), fwd_hooks=[("layers.0.hook_module_probs", lambda probs, hook: probs * 0)]
    )
    unchosen = model.run_with_hooks(
        inputs(), fwd_hooks=[("layers.0.hook_module_choice", lambda choice, hook: choice * 0)]
    )
    assert torch.equal(zeroed, unchosen)
    assert zeroed.isfinite().all()


def test_with_true_operations_only_routing_is_needed():
    names = ("multiply", "add", "subtract")
    model = network(pool=OperationPoolConfig(names=names))
    assert not list(model.pool.parameters())
    x = inputs()
    x1, x2 = x[:, 0, 0], x[:, 1, 0]
    assert torch.allclose(run_path((1, 0), model, x), (x1 + x2) * x1, atol=1e-6)
    assert torch.allclose(run_path((0, 2), model, x), x1 * x2 - x1, atol=1e-6)


# Training


@pytest.mark.parametrize("bottleneck", BOTTLENECKS)
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_gradients_reach_all_parameters_along_sampled_paths(router, bottleneck):
    model = network(router, functional_bottleneck=bottleneck, input_encoder="mlp").train()
    torch.manual_seed(0)
    sampled_path_loss(model, inputs(200), torch.ones(200, 1)).backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not unused


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_gradients_reach_all_parameters_along_all_paths(router):
    model = network(router).train()
    all_paths_loss(model, inputs(200), torch.ones(200, 1), entropy=0.1).backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not unused


def test_the_straight_through_gradient_is_that_of_the_soft_choice():
    model, x = network(n_layers=1, router=ROUTERS["concatenation"]).train(), inputs(1)
    torch.manual_seed(0)
    answer, kept = run_and_keep(model, x, temperature=0.5)
    answer.sum().backward()
    torch.manual_seed(0)
    noise = -torch.empty(1, 3).exponential_().log()
    logits = kept["module_scores"].detach()[:, 0].log_softmax(-1).requires_grad_()
    soft = ((logits + noise) / 0.5).softmax(-1)
    assert torch.equal(kept["module_choice"].argmax(-1), soft.argmax(-1))
    (soft * kept["module_out"].detach()).sum().backward()
    assert torch.allclose(kept["module_scores"].grad[:, 0], logits.grad, atol=1e-5)


@pytest.mark.parametrize("choice", ["pair", "module"])
@pytest.mark.parametrize("name", ["cross", "cross, bottleneck", "encoder, bottleneck"])
def test_all_paths_is_the_expectation_of_sampled_paths(name, choice):
    model, x = network(ROUTERS[name], seed=2, choice=choice).train(), inputs(3)
    targets = torch.tensor([[0.5], [-1.0], [0.0]])
    times = 20_000
    torch.manual_seed(0)
    with torch.no_grad():
        expected = all_paths_loss(model, x, targets)
        repeated, repeated_targets = x.repeat(times, 1, 1), targets.repeat(times, 1)
        errors = (model(repeated) - repeated_targets).square().unflatten(0, (times, 3)).mean((1, 2))
    error = errors.std() / math.sqrt(times)
    assert abs(errors.mean() - expected) < 4 * error
    assert error < 0.02 * expected


def test_the_entropy_term_is_that_of_the_paths():
    model, x, targets = network(), inputs(), torch.zeros(20, 1)
    with torch.no_grad():
        _, probabilities = model.all_paths(x)
        paths = torch.einsum("bi,bj->bij", probabilities[:, 0], probabilities[:, 1]).flatten(1)
        entropy = -(paths * paths.log()).sum(-1).mean()
        plain = all_paths_loss(model, x, targets)
        loss = all_paths_loss(model, x, targets, entropy=0.3)
    assert torch.allclose(loss, plain - 0.3 * entropy, atol=1e-5)


def test_the_entropy_of_certain_choices_has_finite_gradients():
    """Probabilities that are rounded to 0, as of a router that has learned."""
    model, x = network().train(), inputs()
    with torch.no_grad():
        model.router.matching.keys.mul_(1e4)
        assert (model.all_paths(x)[1] == 0).any()
    all_paths_loss(model, x, torch.zeros(20, 1), entropy=0.3).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_the_temperature_changes_gradients_only():
    model, x = network().train(), inputs(2000)
    answers = []
    for temperature in (0.1, 5.0):
        torch.manual_seed(0)
        answers.append(model(x, temperature=temperature))
    assert torch.allclose(*answers, atol=1e-4)


def test_evaluation_is_deterministic():
    model, x = network(), inputs()
    before = torch.get_rng_state()
    assert torch.equal(model(x), model(x))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_it_keeps_the_rules_of_a_mechanism(router):
    for model in (
        network(router),
        network(router, pool=OperationPoolConfig(names=("add", "multiply", "maximum"))),
        network(router, input_encoder="mlp", choice="module"),
    ):
        mechanisms.check(model, inputs())


def test_a_monolithic_network_is_a_perceptron():
    config = MonolithicConfig(n_variables=5, d_input=4, d_mlp=11, depth=3)
    model = Monolithic(config, generator=torch.Generator().manual_seed(0)).eval()
    x = inputs()
    h = x.flatten(1)
    for layer in model.layers:
        h = (h @ layer.W + layer.b).relu()
    assert torch.allclose(model(x), (h @ model.W_out + model.b_out)[:, None], atol=1e-5)
    zero_hidden = [("layers.1.hook_post", lambda post, hook: 0 * post)]
    assert not model.run_with_hooks(x, fwd_hooks=zero_hidden).any()
    mechanisms.check(model, x)


def test_invalid_settings_and_inputs_are_refused():
    for changes, message in (
        ({"n_modules": 0}, "n_modules must be at least 1, got 0"),
        ({"n_variables": 1}, "n_variables must be at least 2, got 1"),
        ({"selection": "x"}, "selection must be one of hard, soft, top_k, got 'x'"),
        ({"functional_bottleneck": "x"}, "functional_bottleneck must be one of oracle"),
        ({"selection": "top_k"}, "top_k must be an integer with selection='top_k', got None"),
        ({"top_k": 2}, "top_k must be None with selection='hard', got 2"),
        ({"selection": "top_k", "top_k": 4}, r"top_k must be in \[1, n_modules = 3\], got 4"),
        ({"temperature": 0.0}, "temperature must be greater than 0, got 0.0"),
        ({"choice": "x"}, "choice must be one of pair, module, got 'x'"),
        ({"input_encoder": "x"}, "input_encoder must be one of linear, mlp, got 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            network(**changes)
    model = network()
    with pytest.raises(ValueError, match=r"inputs must be \[batch, 5, 4\], got \(3, 4, 4\)"):
        model(torch.zeros(3, 4, 4))
    with pytest.raises(ValueError, match=r"temperature must be greater than 0, got -1"):
        model(inputs(), temperature=-1)
    with pytest.raises(ValueError, match=r"layer must be in \[0, 2\), got 2"):
        model.advance(inputs(), 2, model.begin(inputs()))
    with pytest.raises(ValueError, match=r"d_mlp must be at least 1, got 0"):
        MonolithicConfig(n_variables=5, d_input=4, d_mlp=0)
