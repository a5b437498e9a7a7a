from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import mechanisms
from mechanisms.models.dnc import (
    LINK_EPSILON,
    NORM_EPSILON,
    USAGE_EPSILON,
    Dnc,
    DncConfig,
    allocation_weights,
    content_weights,
    sharpened,
    updated_links,
)
from tests.mechanisms.checks import (
    check_seed_determines_weights,
    dropout_calls,
)

SMALL = DncConfig(d_input=6, d_output=3, d_embed=5, d_hidden=4, n_cells=5, d_cell=3, n_read_heads=2)
VARIANTS = {
    "published": SMALL,
    "masked": replace(SMALL, masked_content_addressing=True),
    "no deallocation": replace(SMALL, deallocation=False),
    "no sharpness": replace(SMALL, link_sharpness=False),
    "clipped": replace(SMALL, clip_controls=0.5),
    "plain": replace(SMALL, deallocation=False, link_sharpness=False, clip_controls=None),
}
LENGTHS = (8, 1, 3, 2)
TOKENS = torch.tensor(
    [[2, 0, 5, 1, 1, 4, 3, 0], [4] + [-1] * 7, [1, 3, 3] + [-1] * 5, [0, 5] + [-1] * 6]
)


def build(config=SMALL, seed=0, dtype=torch.float32):
    model = Dnc(config, generator=torch.Generator().manual_seed(seed)).eval().to(dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            # Zero biases would hide a missing bias; noise makes the gates less uniform.
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return model.requires_grad_(False)


def random(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# A slow reference: Graves et al. 2016 and Csordás & Schmidhuber 2019, one number at a time.


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def oneplus(x):
    return 1 + np.log1p(np.exp(x))


def slow_content(memory, key, mask, strength):
    scores = []
    for row in memory:
        product = row_norm = key_norm = 0.0
        for value, key_value, weight in zip(row, key, mask, strict=True):
            product += (key_value * weight) * (value * weight)
            row_norm += (value * weight) ** 2
            key_norm += (key_value * weight) ** 2
        norms = np.sqrt(row_norm + NORM_EPSILON) * np.sqrt(key_norm + NORM_EPSILON)
        scores.append(np.exp(strength * product / norms))
    return np.array(scores) / sum(scores)


def slow_allocation(usage):
    usage = [USAGE_EPSILON + (1 - USAGE_EPSILON) * u for u in usage]
    weights = np.zeros(len(usage))
    free_list = sorted(range(len(usage)), key=lambda i: (usage[i], i))
    for rank, i in enumerate(free_list):
        weights[i] = 1 - usage[i]
        for j in free_list[:rank]:
            weights[i] *= usage[j]
    return weights


def slow_links(links, precedence, write_weights):
    new = np.zeros_like(links)
    for i in range(len(links)):
        for j in range(len(links)):
            if i != j:
                new[i, j] = (1 - write_weights[i] - write_weights[j]) * links[i, j]
                new[i, j] += write_weights[i] * precedence[j]
    return new


def slow_sharpened(weights, sharpness):
    if max(weights) < LINK_EPSILON:
        # Such weights are only tested if they are exactly 0.
        assert max(weights) == 0
        return np.zeros(len(weights))
    powers = [weight**sharpness for weight in weights]
    return np.array(powers) / sum(powers)


def slow_step(config, core, x, state):
    n_heads, width, n_cells = core.n_heads, core.d_cell, core.n_cells
    weights = {name: parameter.numpy() for name, parameter in core.named_parameters()}
    hidden, cell, memory, usage, links, precedence, last_write, last_reads, vectors = state

    recurrent = np.concatenate((vectors.ravel(), hidden))
    sums = x @ weights["W_x"] + recurrent @ weights["W_h"] + weights["b"]
    write, forget, content, out = np.split(sums, 4)
    cell = sigmoid(forget) * cell + sigmoid(write) * np.tanh(content)
    hidden = sigmoid(out) * np.tanh(cell)

    interface = hidden @ weights["W_interface"] + weights["b_interface"]
    if config.clip_controls is not None:
        interface = [max(-config.clip_controls, min(config.clip_controls, x)) for x in interface]
    interface = list(interface)
    masked = config.masked_content_addressing

    def take(count):
        taken = np.array(interface[:count])
        del interface[:count]
        return taken

    read_keys = take(n_heads * width).reshape(n_heads, width)
    read_masks = np.ones((n_heads, width))
    if masked:
        read_masks = sigmoid(take(n_heads * width)).reshape(n_heads, width)
    read_strengths = oneplus(take(n_heads))
    write_key = take(width)
    write_mask = sigmoid(take(width)) if masked else np.ones(width)
    write_strength = oneplus(take(1))[0]
    erase, write_vector = sigmoid(take(width)), take(width)
    free = sigmoid(take(n_heads))
    allocation_gate, write_gate = sigmoid(take(1))[0], sigmoid(take(1))[0]
    modes = np.exp(take(3 * n_heads)).reshape(n_heads, 3)
    modes = modes / modes.sum(1, keepdims=True)
    if config.link_sharpness:
        sharpness = oneplus(take(2 * n_heads)).reshape(n_heads, 2)
    assert not interface

    retention = np.ones(n_cells)
    for i in range(n_cells):
        for head in range(n_heads):
            retention[i] *= 1 - free[head] * last_reads[head, i]
    usage = np.array(
        [
            (usage[i] + last_write[i] - usage[i] * last_write[i]) * retention[i]
            for i in range(n_cells)
        ]
    )
    write_content = slow_content(memory, write_key, write_mask, write_strength)
    allocation = slow_allocation(usage)
    write_weights = np.array(
        [
            write_gate
            * (allocation_gate * allocation[i] + (1 - allocation_gate) * write_content[i])
            for i in range(n_cells)
        ]
    )
    new_memory = np.zeros_like(memory)
    for i in range(n_cells):
        for d in range(width):
            kept = memory[i, d] * (1 - write_weights[i] * erase[d])
            kept *= retention[i] if config.deallocation else 1
            new_memory[i, d] = kept + write_weights[i] * write_vector[d]
    links = slow_links(links, precedence, write_weights)
    precedence = (1 - sum(write_weights)) * precedence + write_weights

    reads = np.zeros_like(last_reads)
    for head in range(n_heads):
        forward, backward = np.zeros(n_cells), np.zeros(n_cells)
        for i in range(n_cells):
            for j in range(n_cells):
                forward[i] += links[i, j] * last_reads[head, j]
                backward[i] += links[j, i] * last_reads[head, j]
        if config.link_sharpness:
            backward = slow_sharpened(backward, sharpness[head, 0])
            forward = slow_sharpened(forward, sharpness[head, 1])
        read_content = slow_content(
            new_memory, read_keys[head], read_masks[head], read_strengths[head]
        )
        for i in range(n_cells):
            mixture = zip(modes[head], (backward[i], read_content[i], forward[i]), strict=True)
            reads[head, i] = sum(mode * weight for mode, weight in mixture)
    vectors = np.zeros_like(vectors)
    for head in range(n_heads):
        for i in range(n_cells):
            vectors[head] += reads[head, i] * new_memory[i]
    gates = {
        "free_gates": free,
        "allocation_gate": allocation_gate,
        "write_gate": write_gate,
        "read_modes": modes,
    }
    state = (hidden, cell, new_memory, usage, links, precedence, write_weights, reads, vectors)
    return state, gates


def slow_model(model, tokens):
    """Logits and the activations of each step, for one sequence without padding."""
    state = tuple(tensor[0].numpy() for tensor in model.core.initial_state(1))
    steps = []
    for token in tokens:
        state, gates = slow_step(model.config, model.core, model.W_E[token].numpy(), state)
        names = ("hidden", "cell", "memory", "usage", "links", "", "write_weights")
        names += ("read_weights", "read_vectors")
        states = {name: value for name, value in zip(names, state, strict=True) if name}
        steps.append(gates | states)
    output = state[0] @ model.W_controller.numpy() + state[-1].ravel() @ model.W_read.numpy()
    output = output + model.b_out.numpy()
    return output @ model.W_U.numpy() + model.b_U.numpy(), steps


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_agrees_with_the_equations_one_number_at_a_time(config):
    model = build(config, dtype=torch.float64)
    model.set_positions(8)
    logits, cache = model.run_with_cache(TOKENS)
    assert logits.shape == (4, 1, 3)
    for row, length in enumerate(LENGTHS):
        expected, steps = slow_model(model, TOKENS[row, :length].tolist())
        for position, quantities in enumerate(steps):
            names = {name for name in model.hook_dict if name.startswith(f"steps.{position}.")}
            assert names == {f"steps.{position}.hook_{name}" for name in quantities}
            for name, theirs in quantities.items():
                ours = cache[f"steps.{position}.hook_{name}"][row]
                np.testing.assert_allclose(ours, theirs, atol=1e-11, err_msg=f"{position} {name}")
        np.testing.assert_allclose(logits[row, 0], expected, atol=1e-11)


def test_content_is_the_softmax_of_masked_cosines():
    memory, keys = normal(2, 6, 4), normal(2, 3, 4, seed=1)
    masks, strengths = random(2, 3, 4, seed=2), 1 + 5 * random(2, 3, seed=3)
    ours = content_weights(memory, keys, masks, strengths)
    masked = [memory[:, None] * masks[:, :, None], (keys * masks)[:, :, None]]
    cosine = torch.cosine_similarity(masked[0], masked[1], dim=-1)
    assert torch.allclose(ours, (strengths[..., None] * cosine).softmax(-1), atol=1e-5)
    plain = content_weights(memory, keys, None, strengths)
    assert torch.equal(plain, content_weights(memory, keys, torch.ones_like(keys), strengths))
    # The masked part of a row makes no difference.
    masks = torch.tensor([1.0, 0, 1, 0], dtype=torch.float64).expand(2, 3, 4)
    other = memory + normal(2, 6, 4, seed=4) * (1 - masks[:, :1])
    ours = content_weights(memory, keys, masks, strengths)
    assert torch.allclose(content_weights(other, keys, masks, strengths), ours, atol=1e-12)
    assert not torch.allclose(content_weights(other, keys, masks * 0 + 1, strengths), ours)


def test_an_empty_memory_or_key_gives_uniform_weights_and_finite_gradients():
    memory = torch.zeros(1, 4, 3, requires_grad=True)
    keys = torch.zeros(1, 2, 3, requires_grad=True)
    weights = content_weights(memory, keys, torch.ones(1, 2, 3), torch.ones(1, 2))
    assert torch.allclose(weights, torch.full((1, 2, 4), 0.25))
    weights[0, 0, 0].backward()
    assert memory.grad is not None
    assert keys.grad is not None
    assert memory.grad.isfinite().all()
    assert keys.grad.isfinite().all()


@pytest.mark.parametrize(
    "usage",
    [
        [0.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 0.0, 1.0, 0.5],
        [0.3, 0.2, 0.2, 0.9],
        [1e-9, 0.7, 0.0, 1.0],
    ],
)
def test_allocation_goes_to_the_freest_row_first(usage):
    tensor = torch.tensor([usage], dtype=torch.float64, requires_grad=True)
    weights = allocation_weights(tensor)
    np.testing.assert_allclose(weights[0].detach(), slow_allocation(usage), atol=1e-12)
    assert torch.allclose(weights.sum(-1), 1 - tensor.prod(-1), atol=1e-5)
    weights.square().sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.isfinite().all()


def test_allocation_of_many_free_rows_is_finite_in_single_precision():
    usage = torch.zeros(1, 200, requires_grad=True)
    weights = allocation_weights(usage)
    weights[0, 1].backward()
    assert torch.allclose(weights[0, :3], torch.tensor([1.0, 0.0, 0.0]), atol=1e-5)
    assert usage.grad is not None
    assert usage.grad.isfinite().all()


def test_links_are_the_order_of_writing():
    """Rows 2, 0, 3 are written in this order: forward links lead from 2 to 0 to 3."""
    links, precedence = torch.zeros(1, 4, 4), torch.zeros(1, 4)
    for row in (2, 0, 3):
        write_weights = torch.eye(4)[row][None]
        links = updated_links(links, precedence, write_weights)
        precedence = write_weights
    expected = torch.zeros(4, 4)
    expected[0, 2] = expected[3, 0] = 1
    assert torch.equal(links[0], expected)
    # Row 2 is written again: its only remaining link is from the last row written.
    again = updated_links(links, precedence, torch.eye(4)[2][None])
    expected = torch.zeros(4, 4)
    expected[3, 0] = expected[2, 3] = 1
    assert torch.equal(again[0], expected)


def test_links_agree_with_loops():
    links, precedence = 0.3 * random(2, 5, 5), 0.2 * random(2, 5, seed=1)
    write_weights = 0.2 * random(2, 5, seed=2)
    ours = updated_links(links, precedence, write_weights)
    for row in range(2):
        theirs = slow_links(links[row].numpy(), precedence[row].numpy(), write_weights[row].numpy())
        np.testing.assert_allclose(ours[row], theirs, atol=1e-15)


def test_sharpening_normalises_and_raises_to_a_power():
    weights, ones = random(3, 5), torch.ones(3, dtype=torch.float64)
    shares = weights / weights.sum(-1, keepdim=True)
    assert torch.allclose(sharpened(weights, ones), shares)
    assert torch.allclose(sharpened(0.01 * weights, ones), shares)
    squares = weights**2 / (weights**2).sum(-1, keepdim=True)
    assert torch.allclose(sharpened(weights, 2 * ones), squares)
    one_hot = torch.nn.functional.one_hot(weights.argmax(-1), 5).double()
    assert torch.allclose(sharpened(weights, 1000 * ones), one_hot)


def test_sharpening_is_safe_where_nothing_is_linked_and_where_powers_vanish():
    weights = torch.tensor(
        [[0.0, 0, 0], [0, 1e-9, 0], [3e-3, 2e-3, 0], [-1e-9, 0.5, 0], [0, 0, 0.5]],
        requires_grad=True,
    )
    sharpness = torch.tensor([1.0, 2.0, 40.0, 1.5, 1.0], requires_grad=True)
    result = sharpened(weights, sharpness)
    ratio = 1 / (1 + (2 / 3) ** 40)
    expected = [[0, 0, 0], [0, 0, 0], [ratio, 1 - ratio, 0], [0, 1, 0], [0, 0, 1]]
    assert torch.allclose(result, torch.tensor(expected), atol=1e-4)
    result.square().sum().backward()
    for tensor in (weights, sharpness):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


def test_gradients_of_sharpening_are_those_of_finite_differences():
    weights = (0.05 + random(2, 4)).requires_grad_(True)
    sharpness = (1 + random(2, seed=1)).requires_grad_(True)
    assert torch.autograd.gradcheck(sharpened, (weights, sharpness))


@pytest.mark.parametrize("seed", range(3))
def test_weights_and_links_stay_distributions(seed):
    model = build(seed=seed)
    tokens = torch.randint(6, (16, 32), generator=torch.Generator().manual_seed(seed))
    model.set_positions(32)
    _, cache = model.run_with_cache(tokens)
    upper = 1 + 1e-5
    for position in range(32):
        activations = {
            name: cache[f"steps.{position}.hook_{name}"]
            for name in ("usage", "write_weights", "links", "read_weights", "read_modes")
        }
        for name, values in activations.items():
            assert values.min() >= -1e-6, name
            assert values.max() <= upper, name
        assert activations["write_weights"].sum(-1).max() <= upper
        assert activations["read_weights"].sum(-1).max() <= upper
        assert torch.allclose(activations["read_modes"].sum(-1), torch.ones(16, 2))
        links = activations["links"]
        assert torch.equal(links.diagonal(dim1=1, dim2=2), torch.zeros(16, 5))
        assert links.sum(1).max() <= upper
        assert links.sum(2).max() <= upper
    # Some rows are written and linked.
    assert cache["steps.31.hook_links"].sum((1, 2)).max() > 0.3


def freeing(read_row, gate):
    """All read heads read one row at step 2; step 3 frees what was read, and writes nothing."""

    def read(weights, hook):
        return torch.nn.functional.one_hot(torch.tensor(read_row), 5).float().expand_as(weights)

    return [
        ("steps.2.hook_read_weights", read),
        ("steps.3.hook_free_gates", lambda gates, hook: torch.full_like(gates, gate)),
        ("steps.3.hook_write_gate", lambda gate, hook: torch.zeros_like(gate)),
    ]


@pytest.mark.parametrize("row", [0, 3])
def test_a_freed_row_is_emptied_and_unused_and_the_others_are_kept(row):
    model = build()
    model.set_positions(8)
    for gate in (0.0, 1.0):
        with model.hooks(freeing(row, gate)):
            _, cache = model.run_with_cache(TOKENS[:1], reset_hooks_end=False)
        before, after = (cache[f"steps.{step}.hook_memory"][0] for step in (2, 3))
        used = cache["steps.3.hook_usage"][0]
        assert before.abs().min() > 1e-3
        expected = before.clone()
        expected[row] *= 1 - gate
        assert torch.equal(after, expected)
        assert used[row] == 0 if gate else used[row] > 1e-3
        others = torch.arange(5) != row
        assert used[others].min() > 1e-3


def test_reading_forward_and_backward_follows_the_order_of_writing():
    """Rows 4, 1, 2 are written; from row 1, forward leads to 2 and backward to 4."""
    model = build()
    model.set_positions(8)
    row = torch.eye(5)

    def at_row(index):
        return lambda weights, hook: row[index].expand_as(weights)

    for mode, expected in ((0, 4), (1, None), (2, 2)):
        hooks = [(f"steps.{t}.hook_write_weights", at_row(i)) for t, i in enumerate((4, 1, 2))]
        hooks += [("steps.1.hook_read_weights", at_row(1))]
        only = torch.eye(3)[mode]
        hooks += [("steps.2.hook_read_modes", lambda modes, hook, only=only: only.expand_as(modes))]
        with model.hooks([*hooks]):
            _, cache = model.run_with_cache(TOKENS[:1], reset_hooks_end=False)
        weights = cache["steps.2.hook_read_weights"][0]
        if expected is None:
            assert weights.max() < 0.99
        else:
            assert torch.allclose(weights, row[expected].expand(2, 5), atol=1e-6)


def test_logits_do_not_depend_on_padding():
    model = build()
    logits = model(TOKENS)
    wider = torch.cat((TOKENS, torch.full((4, 3), -1)), 1)
    assert torch.allclose(model(wider), logits, atol=1e-6)
    for row, length in enumerate(LENGTHS):
        unpadded = model(TOKENS[row : row + 1, :length])
        assert torch.allclose(unpadded, logits[row : row + 1], atol=1e-6)


def test_padded_steps_leave_gradients_alone():
    model = build().requires_grad_(True)
    gradients = []
    for tokens in (TOKENS[1:2], TOKENS[1:2, :1]):
        model.zero_grad()
        model(tokens).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for padded, unpadded in zip(*gradients, strict=True):
        assert torch.allclose(padded, unpadded, atol=1e-5)


def test_hook_names_and_shapes():
    model = build()
    assert set(model.hook_dict) == {"hook_embed"}
    model.set_positions(8)
    logits, cache = model.run_with_cache(TOKENS)
    assert set(cache) == set(model.hook_dict)
    assert "steps.8.hook_memory" not in model.hook_dict
    shapes = {
        "hook_hidden": (4, 4),
        "hook_cell": (4, 4),
        "hook_free_gates": (4, 2),
        "hook_allocation_gate": (4,),
        "hook_write_gate": (4,),
        "hook_read_modes": (4, 2, 3),
        "hook_usage": (4, 5),
        "hook_write_weights": (4, 5),
        "hook_memory": (4, 5, 3),
        "hook_links": (4, 5, 5),
        "hook_read_weights": (4, 2, 5),
        "hook_read_vectors": (4, 2, 3),
    }
    expected = {f"steps.{t}.{name}": shape for t in range(8) for name, shape in shapes.items()}
    expected["hook_embed"] = (4, 8, 5)
    assert {name: tuple(value.shape) for name, value in cache.items()} == expected
    assert torch.allclose(model(TOKENS), logits, atol=1e-6)
    model(torch.zeros(1, 9, dtype=torch.int64))
    assert "steps.8.hook_memory" in model.hook_dict
    assert not any("steps" in name for name in model.state_dict())
    with pytest.raises(ValueError, match="n_positions must be at least 0, got -1"):
        model.set_positions(-1)


def test_interventions_change_the_output_and_no_earlier_step():
    model = build()
    model.set_positions(8)
    unchanged, before = model.run_with_cache(TOKENS)
    generator = torch.Generator().manual_seed(0)

    def change(activation, hook):
        return activation + 0.3 * torch.rand(activation.shape, generator=generator)

    for position in (3, 7):
        for name in [name for name in model.hook_dict if name.startswith(f"steps.{position}.")]:
            with model.hooks([(name, change)]):
                logits, after = model.run_with_cache(TOKENS, reset_hooks_end=False)
            assert logits.isfinite().all(), name
            assert (logits[0] - unchanged[0]).abs().max() > 1e-5, name
            # The other sequences end before position 3.
            shorter = [1, 2, 3]
            assert torch.equal(logits[shorter], unchanged[shorter]), name
            for earlier in range(position):
                for quantity in ("hidden", "memory", "read_weights"):
                    key = f"steps.{earlier}.hook_{quantity}"
                    assert torch.equal(before[key], after[key]), name
    # Without hooks the output is the same again.
    assert torch.allclose(model(TOKENS), unchanged, atol=1e-6)


def first_of_three(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(4, (32, 3), generator=generator)
    return tokens, tokens[:, 0]


def test_learns_to_remember_using_the_memory_only():
    """The target is the first of three tokens; the controller is forced to forget at every step.

    Without an LSTM state from the previous step, information about the first token must go through
    the memory. The control without the memory is at chance.
    """
    config = DncConfig(d_input=4, d_output=4, d_embed=8, d_hidden=16, n_cells=4, d_cell=6)
    model = Dnc(config, generator=torch.Generator().manual_seed(0))
    recurrent = torch.arange(len(model.core.W_h)) >= config.d_cell
    with torch.no_grad():
        model.core.W_h[recurrent] = 0
        model.core.b[16:32] = -50
    model.core.W_h.register_hook(lambda gradient: gradient * ~recurrent[:, None])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(110):
        tokens, targets = first_of_three(step)
        loss = cross_entropy(model(tokens)[:, 0], targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    tokens, targets = first_of_three(10_000)
    with torch.no_grad():
        accuracy = (model(tokens)[:, 0].argmax(-1) == targets).float().mean()
        empty_memory = [(f"steps.{t}.hook_memory", lambda x, hook: 0 * x) for t in range(3)]
        control = model.run_with_hooks(tokens, fwd_hooks=[*empty_memory])[:, 0]
    assert accuracy > 0.95
    assert (control.argmax(-1) == targets).float().mean() < 0.6


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_every_weight_is_trained(config):
    model = build(replace(config, clip_controls=None)).requires_grad_(True)
    model(TOKENS).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 1e-4, name
    # Every column of the interface is used.
    gradient = model.core.b_interface.grad
    assert gradient is not None
    assert (gradient != 0).all()


def test_initial_weights_are_those_of_the_authors():
    config = replace(SMALL, d_hidden=40, d_embed=30, d_cell=20, d_input=60, d_output=30)
    model = Dnc(config, generator=torch.Generator().manual_seed(0))
    core = model.core
    # Glorot & Bengio 2010, with all that a gate reads, and with 5/3 for the tanh.
    gate = (6 / (30 + 2 * 20 + 40 + 40)) ** 0.5
    interface = (6 / (40 + len(core.b_interface))) ** 0.5
    bounds = [(core.W_interface, interface), (model.W_controller, (6 / 80) ** 0.5)]
    bounds += [(model.W_read, (6 / 80) ** 0.5), (model.W_U, 40**-0.5), (model.b_U, 40**-0.5)]
    for weight in (core.W_x, core.W_h):
        bounds += [(weight[:, :80], gate), (weight[:, 80:120], gate * 5 / 3)]
        bounds += [(weight[:, 120:], gate)]
    for weight, bound in bounds:
        assert 0.9 * bound < weight.abs().max() <= bound + 1e-6
    for bias in (core.b_interface, model.b_out):
        assert (bias == 0).all()
    assert torch.equal(core.b, torch.tensor([0.0, 1.0, 0.0, 0.0]).repeat_interleave(40))
    assert abs(model.W_E.std() - 1) < 0.1


def test_clipped_controls_have_their_gates_bounded():
    model = build(replace(SMALL, clip_controls=0.1))
    model.set_positions(8)
    _, cache = model.run_with_cache(TOKENS)
    for name in ("free_gates", "allocation_gate", "write_gate"):
        gates = torch.stack([cache[f"steps.{t}.hook_{name}"] for t in range(1, 8)])
        assert (gates - 0.5).abs().max() < 0.0251, name


def test_dropout_is_on_embeddings(monkeypatch):
    model = build(replace(SMALL, dropout=0.25))
    calls = dropout_calls(model, TOKENS, monkeypatch)
    assert calls == [((4, 8, 5), 0.25, False)]
    output = model(TOKENS)
    model.train()
    assert not torch.allclose(model(TOKENS), output)


def test_the_seed_determines_the_weights():
    check_seed_determines_weights(lambda generator: Dnc(SMALL, generator=generator))


@pytest.mark.slow
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_it_keeps_the_rules_of_a_mechanism(config):
    # Nothing is in memory that could be freed at the first step.
    mechanisms.check(build(config), TOKENS, optional=["steps.0.hook_free_gates"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_cells": 0}, "n_cells must be at least 1, got 0"),
        ({"d_cell": -1}, "d_cell must be at least 1, got -1"),
        ({"n_read_heads": 0}, "n_read_heads must be at least 1, got 0"),
        ({"clip_controls": 0.0}, "clip_controls must be positive, got 0.0"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **settings)
