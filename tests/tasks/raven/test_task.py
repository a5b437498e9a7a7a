"""Raven: compared with a reference and the authors' data, and properties of the sampler."""

import hashlib
import random
import subprocess
import sys
from collections import Counter
from itertools import combinations_with_replacement, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import RAVEN_RULES, Raven, RavenConfig
from tasks.raven.rules import DIFFERENCE, DISTRIBUTE, SUM, rule_answers
from tests.tasks.raven import raven_reference as reference

CONTRACT_EXAMPLES = {"": lambda folder: Raven(RavenConfig(n_features=2))}

GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "sraven_samples.npz")
ROOT = Path(__file__).parents[3]


def fingerprint(batch):
    digest = hashlib.sha256()
    for tensor in (batch.inputs, batch.targets, batch.mask, *batch.latents.values()):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def decode(inputs, n_features):
    """Return the values [batch, 3, 3, K] of inputs [batch, 9 K, F]."""
    return inputs.argmax(-1).view(-1, 3, 3, n_features)


@pytest.mark.parametrize("n_features", [2, 4])
@pytest.mark.parametrize("split", Raven.SPLITS)
def test_every_feature_obeys_its_rule(split, n_features):
    batch = Raven(RavenConfig(n_features=n_features)).batch(split, 3, 300)
    values, rules = batch.latents["values"].tolist(), batch.latents["rule"].tolist()
    seen = set()
    for grid, grid_rules in zip(values, rules, strict=True):
        for feature, rule in enumerate(grid_rules):
            feature_grid = [[panel[feature] for panel in row] for row in grid]
            assert reference.obeys(rule, feature_grid, 8)
            seen.add(rule)
    assert seen == set(range(8))


@settings(deadline=None, max_examples=25)
@given(
    n_features=st.integers(1, 5),
    n_values=st.integers(3, 11),
    seed=st.integers(0, 2**32 - 1),
    index=st.integers(0, 2**40),
    split=st.sampled_from(Raven.SPLITS),
    rule_order=st.sampled_from(["random", "sorted"]),
)
def test_any_task_obeys_its_rules(n_features, n_values, seed, index, split, rule_order):
    config = RavenConfig(
        n_features=n_features,
        n_values=n_values,
        seed=seed,
        cover_rules=n_features > 1,
        rule_order=rule_order,
    )
    task = Raven(config)
    batch = task.batch(split, index, 7)
    rules = batch.latents["rule"]
    for grid, grid_rules in zip(batch.latents["values"].tolist(), rules.tolist(), strict=True):
        for feature, rule in enumerate(grid_rules):
            feature_grid = [[panel[feature] for panel in row] for row in grid]
            assert reference.obeys(rule, feature_grid, n_values)
    allowed = {tuple(rule) for rule in task.combinations(split).tolist()}
    assert {tuple(sorted(rule)) for rule in rules.tolist()} <= allowed
    if rule_order == "sorted":
        assert (rules.diff(dim=1) >= 0).all()


@pytest.mark.parametrize("split", Raven.SPLITS)
def test_inputs_hold_the_permuted_values_without_the_last_panel(split):
    task = Raven(RavenConfig(n_features=3, n_values=5))
    batch = task.batch(split, 0, 200)
    assert len(batch) == 200
    assert batch.inputs.shape == (200, 27, 5)
    assert (batch.inputs[:, :24].sum(-1) == 1).all()
    assert (batch.inputs[:, 24:] == 0).all()
    assert batch.mask.all()
    shown, order = decode(batch.inputs, 3), batch.latents["permutation"]
    shown[:, 2, 2] = batch.targets
    inverse = order.argsort(-1)[:, None].expand(-1, 3, -1, -1)
    assert torch.equal(shown.gather(3, inverse), batch.latents["values"])
    is_identity = (order == torch.arange(3)).all(-1).all(-1)
    assert is_identity.all() == (not task.is_permuted(split))
    response = batch.latents["rule"].gather(1, order[:, 2])
    assert torch.equal(response, batch.latents["response_rule"])
    multisets = list(combinations_with_replacement(range(8), 3))
    for rules, index in zip(batch.latents["rule"], batch.latents["combination"], strict=True):
        assert multisets[index] == tuple(rules.sort().values.tolist())


def test_split_sides_are_disjoint_and_cover_all_combinations():
    for n_features, n_ood in ((2, 9), (4, 82)):
        for seed in range(5):
            task = Raven(RavenConfig(n_features=n_features, seed=seed))
            sides = {
                split: {tuple(rules) for rules in task.combinations(split).tolist()}
                for split in task.splits
            }
            assert sides["train"] == sides["id"] == sides["id_unpermuted"]
            assert sides["ood"] == sides["ood_unpermuted"]
            assert len(sides["ood"]) == n_ood
            assert not sides["train"] & sides["ood"]
            everything = combinations_with_replacement(range(8), n_features)
            assert sides["train"] | sides["ood"] == set(everything)
            for side in sides.values():
                assert {rule for rules in side for rule in rules} == set(range(8))


def test_the_seed_chooses_what_is_held_out():
    held_out = [Raven(RavenConfig(seed=seed)).combinations("ood").tolist() for seed in (0, 0, 1)]
    assert held_out[0] == held_out[1] != held_out[2]


def test_without_cover_rules_a_side_may_lack_some():
    task = Raven(RavenConfig(n_features=2, ood_fraction=1 / 36, cover_rules=False))
    assert len(task.combinations("ood")) == 1
    assert len(task.combinations("train")) == 35


def test_a_batch_is_a_pure_function_of_its_arguments():
    config = RavenConfig(n_features=3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    first = fingerprint(Raven(config).batch("train", 5, 50))
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]

    task = Raven(config)
    task.batch("id", 1, 9)
    assert fingerprint(task.batch("train", 5, 50)) == first
    others = [
        task.batch("train", 6, 50),
        task.batch("id", 5, 50),
        Raven(RavenConfig(n_features=3, seed=1)).batch("train", 5, 50),
    ]
    assert first not in {fingerprint(batch) for batch in others}
    # 32 bits would not tell these apart.
    assert fingerprint(task.batch("train", 5 + 2**32, 50)) != first


def test_another_process_makes_the_same_batch():
    script = (
        "import hashlib\n"
        "from tasks import Raven, RavenConfig\n"
        "batch = Raven(RavenConfig(n_features=2)).batch('ood', 17, 40)\n"
        "print(hashlib.sha256(batch.inputs.numpy().tobytes()).hexdigest())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    here = Raven(RavenConfig(n_features=2)).batch("ood", 17, 40).inputs.numpy().tobytes()
    assert done.stdout.strip() == hashlib.sha256(here).hexdigest()


def test_importing_the_package_is_cheap():
    script = "import sys, tasks; dir(tasks); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_every_export_is_there():
    import tasks

    for name in tasks.__all__:
        assert getattr(tasks, name) is not None
    with pytest.raises(AttributeError, match="Ravenn"):
        _ = tasks.Ravenn  # pyright: ignore


def test_random_order_gives_every_position_the_same_rules():
    task = Raven(RavenConfig(n_features=4))
    rules = task.batch("train", 0, 20_000).latents["rule"]
    combinations = task.combinations("train")
    expected = torch.bincount(combinations.flatten(), minlength=8) / combinations.numel()
    for position in range(4):
        share = torch.bincount(rules[:, position], minlength=8) / len(rules)
        assert (share - expected).abs().max() < 5 * (0.25 / len(rules)) ** 0.5


def test_sorted_order_tells_the_last_rule():
    # Over all 330 multisets: C(10, 3) = 120 of them hold "distribute three", 36%.
    task = Raven(RavenConfig(n_features=4, rule_order="sorted"))
    shares = []
    for split, weight in (("train", 248 / 330), ("ood", 82 / 330)):
        last = task.batch(split, 0, 10_000).latents["rule"][:, -1]
        shares.append(weight * (last == 7).double().mean().item())
    assert sum(shares) == pytest.approx(120 / 330, abs=0.02)


def test_combinations_and_orders_are_uniform():
    task = Raven(RavenConfig(n_features=3))
    latents = task.batch("ood", 0, 30_000).latents
    counts = [torch.bincount(latents["combination"])]
    counts[0] = counts[0][counts[0] > 0]
    assert len(counts[0]) == 30
    for column in range(3):
        orders = Counter(map(tuple, latents["permutation"][:, column].tolist()))
        assert set(orders) == set(permutations(range(3)))
        counts.append(torch.tensor(list(orders.values())))
    for count in counts:
        assert_uniform(count)


def test_rows_are_as_likely_as_the_rule_says():
    task = Raven(RavenConfig(n_features=2, n_values=5))
    latents = task.batch("train", 0, 40_000).latents
    for feature in range(2):
        for rule in range(8):
            of_rule = latents["rule"][:, feature] == rule
            grids = latents["values"][of_rule][..., feature]
            for row in (0, 1, 2):
                rows = Counter(map(tuple, grids[:, row].tolist()))
                assert set(rows) == set(reference.rows_of(rule, 5))
                assert_uniform(torch.tensor(list(rows.values())))
            # Later rows do not depend on the first, but for the set of distribute-three.
            pairs = Counter(map(tuple, grids[:, 1:, 0].tolist()))
            assert len(pairs) == 25
            same = (grids[:, 1] == grids[:, 2]).all(-1).double().mean().item()
            expected = 1 / len(reference.rows_of(rule, 5, (0, 1, 2)))
            assert same == pytest.approx(expected, abs=5 * (0.25 / len(grids)) ** 0.5)


def assert_uniform(counts):
    """Assert that chi-squared is within five standard deviations of its mean."""
    expected = counts.sum() / len(counts)
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(counts) - 1
    assert abs(chi_squared - freedom) < 5 * (2 * freedom) ** 0.5


def test_answers_by_rule_against_plain_python():
    task = Raven(RavenConfig(n_features=3, n_values=4))
    values = task.batch("id_unpermuted", 1, 200).latents["values"]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(4, values.shape, generator=generator)
    for grids in (values, noise):
        answer, defined = task.answers_by_rule(grids)
        hidden = grids.clone()
        hidden[:, 2, 2] = 0
        assert torch.equal(task.answers_by_rule(hidden)[0], answer)
        for b, k, rule in np.ndindex(len(grids), 3, 8):
            expected = reference.answer_by_rule(rule, grids[b, :, :, k].tolist(), 4)
            assert defined[b, k, rule] == (expected is not None)
            assert answer[b, k, rule] == (-1 if expected is None else expected)


def test_the_rule_itself_gives_the_target():
    task = Raven(RavenConfig())
    batch = task.batch("ood", 0, 300)
    answer, defined = task.answers_by_rule(batch.latents["values"])
    rule = batch.latents["rule"][..., None]
    assert defined.gather(2, rule).all()
    by_feature = answer.gather(2, rule)[..., 0]
    assert torch.equal(by_feature.gather(1, batch.latents["permutation"][:, 2]), batch.targets)


def test_score_counts_whole_answers_and_features():
    task = Raven(RavenConfig(n_features=2, n_values=4))
    assert task.chance == pytest.approx(1 / 16)
    batch = task.batch("id", 0, 3)
    guess = batch.targets.clone()
    guess[1, 0] = (guess[1, 0] + 1) % 4
    guess[2] = (guess[2] + 1) % 4
    score = task.score(torch.nn.functional.one_hot(guess, 4).float(), batch)
    assert score["accuracy"].tolist() == [1, 0, 0]
    assert score["feature_accuracy"].tolist() == [1, 0.5, 0]
    with pytest.raises(ValueError, match=r"\(3, 2, 4\)"):
        task.score(torch.zeros(3, 18, 4), batch)


# The authors' data


def test_golden_combinations_have_the_same_order():
    ours = list(combinations_with_replacement(range(8), 4))
    assert GOLDEN["latents_all"].tolist() == [list(rules) for rules in ours]
    task = Raven(RavenConfig(cover_rules=False))
    both = torch.cat([task.combinations("train"), task.combinations("ood")]).tolist()
    assert sorted(both) == GOLDEN["latents_all"].tolist()
    assert len(GOLDEN["latents_idx_out_dist_seed2024"]) == task.config.n_ood


@pytest.mark.parametrize("name", ["perm.train", "perm.ood", "noperm.train", "noperm.ood"])
def test_golden_instances_obey_our_rules_under_our_conventions(name):
    values = torch.from_numpy(GOLDEN[f"{name}.instances"]).long()
    rules = torch.from_numpy(GOLDEN[f"{name}.latents"]).long()
    if name.startswith("perm"):
        orders = torch.from_numpy(GOLDEN[f"{name}.perms"]).long()
        values = values.gather(3, orders.argsort(-1)[:, None].expand(-1, 3, -1, -1))
    answer, _ = Raven(RavenConfig()).answers_by_rule(values)
    assert torch.equal(answer.gather(2, rules[..., None])[..., 0], values[:, 2, 2])
    for grid, grid_rules in zip(values.tolist(), rules.tolist(), strict=True):
        for feature, rule in enumerate(grid_rules):
            assert reference.obeys(rule, [[panel[feature] for panel in row] for row in grid], 8)


def test_golden_single_rules():
    grids, rules = GOLDEN["single_rule.grids"], GOLDEN["single_rule.latents"]
    assert set(rules.tolist()) == set(range(len(RAVEN_RULES)))
    for grid, rule in zip(grids.tolist(), rules.tolist(), strict=True):
        assert reference.obeys(rule, grid, 8)


def test_golden_batch_is_encoded_as_ours(monkeypatch):
    """With draws that encode the authors' instances, the sampler makes the authors' batch."""
    task = Raven(RavenConfig(rule_order="sorted", cover_rules=False))
    golden = torch.from_numpy(GOLDEN["batch.x"])
    rules = torch.from_numpy(GOLDEN["batch.latents"]).long()
    orders = torch.from_numpy(GOLDEN["batch.perms"]).long()
    shown = decode(golden, 4)
    shown[:, 2, 2] = torch.from_numpy(GOLDEN["batch.y"]).long()
    values = shown.gather(3, orders.argsort(-1)[:, None].expand(-1, 3, -1, -1))
    for i in range(len(golden)):
        sides = {s: task.combinations(s).tolist() for s in ("train", "ood")}
        split = "train" if rules[i].tolist() in sides["train"] else "ood"
        draws = draws_for(sides[split], rules[i], orders[i], values[i])
        monkeypatch.setattr(task, "_draw_cpu", lambda *_, draws=draws: draws)
        batch = task.batch(split, 0, 1)
        assert torch.equal(batch.inputs[0], golden[i])
        assert torch.equal(batch.targets[0], shown[i, 2, 2])
        assert torch.equal(batch.latents["rule"][0], rules[i])
        assert torch.equal(batch.latents["permutation"][0], orders[i])
        assert torch.equal(batch.latents["values"][0], values[i])


def draws_for(side, rules, orders, values):
    """Return uniform draws, [1, 5 + 4 K], from which the sampler makes this instance."""
    tables = Raven(RavenConfig(rule_order="sorted", cover_rules=False))._tables_on(
        torch.device("cpu")
    )
    all_orders = tables.orders.tolist()
    draws = [(side.index(rules.tolist()) + 0.5) / len(side), 0.5]
    draws += [(all_orders.index(order) + 0.5) / len(all_orders) for order in orders.tolist()]
    for feature, rule in enumerate(rules.tolist()):
        grid = values[..., feature].tolist()
        n_rows = [int(n) for n in tables.ranges[rule]]
        start, triple = int(tables.row_start[rule]), 0
        if rule == 7:
            block = tables.rows[start:].tolist()
            triple = block.index(grid[0]) // 6
            start += 6 * triple
        draws.append((triple + 0.5) / n_rows[0])
        options = tables.rows[start : start + n_rows[1]].tolist()
        draws += [(options.index(row) + 0.5) / n_rows[1] for row in grid]
    return torch.tensor([draws], dtype=torch.float64)


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_features": 0}, "n_features must be .*, got 0"),
        ({"n_features": 2.0}, "n_features must be .*, got 2.0"),
        ({"n_features": True}, "n_features must be .*, got True"),
        ({"n_values": 2}, "n_values must be .*, got 2"),
        ({"seed": -1}, "seed must be .*, got -1"),
        ({"ood_fraction": 0}, r"ood_fraction must leave .* got 0, which holds out 0 of the"),
        ({"ood_fraction": 1}, r"ood_fraction must leave .* got 1, which"),
        ({"ood_fraction": 0.001}, r"ood_fraction must leave .* got 0.001, which"),
        ({"ood_fraction": float("nan")}, "ood_fraction must be a number from 0 to 1, got nan"),
        ({"cover_rules": 1}, "cover_rules must be .*, got 1"),
        ({"rule_order": "sort"}, "rule_order must be .*, got 'sort'"),
        ({"n_features": 1}, r"cover_rules must be False with n_features=1 .* got True"),
        (
            {"n_features": 2, "ood_fraction": 0.05},
            r"cover_rules must be .*ood_fraction=0.05, got True",
        ),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        RavenConfig(**arguments)


def test_an_unknown_config_key_is_an_error():
    with pytest.raises(TypeError, match="n_feature"):
        RavenConfig(n_feature=2)  # pyright: ignore


def test_a_split_that_is_not_found_is_an_error(monkeypatch):
    # Four pairs hold all eight rules in 0.2% of the splits.
    monkeypatch.setattr("tasks.raven.task._SPLIT_TRIES", 1)
    with pytest.raises(ValueError, match="none of 1 random splits does"):
        Raven(RavenConfig(n_features=2, ood_fraction=4 / 36))
    monkeypatch.undo()
    ood = Raven(RavenConfig(n_features=2, ood_fraction=4 / 36)).combinations("ood")
    assert sorted(ood.flatten().tolist()) == list(range(8))


def test_bad_arguments_of_batch():
    task = Raven(RavenConfig(n_features=2))
    with pytest.raises(ValueError, match=r"one of train, id, .*; nearest: 'ood_unpermuted'"):
        task.batch("ood_unpermute", 0, 1)
    with pytest.raises(ValueError, match=r"split must be one of train, .*, got 'zzz'"):
        task.combinations("zzz")
    with pytest.raises(ValueError, match=r"index must be .*, got -1"):
        task.batch("train", -1, 1)
    with pytest.raises(ValueError, match=r"size must be .*, got 0"):
        task.batch("train", 0, 0)


def test_rule_answers_broadcasts_over_leading_dims():
    first_row = torch.tensor([[[0, 1, 2]], [[0, 0, 2]]])
    answer, defined = rule_answers(first_row, torch.tensor([[2], [2]]), torch.tensor([[0], [0]]), 5)
    assert answer[:, 0].tolist() == [[0, 1, 2, 4, 3, 2, 2, 1], [0, 1, 2, 4, 3, 2, 2, -1]]
    assert defined[:, 0, 7].tolist() == [True, False]


def test_a_quarter_of_the_combinations_of_four_rules_is_the_references_number():
    """Its int(330 * 0.25)."""
    config = RavenConfig(rule_order="sorted", cover_rules=False)
    assert (config.n_combinations, config.n_ood) == (330, 82)
    assert len(GOLDEN["latents_idx_out_dist_seed2024"]) == 82


# Counterfactuals


@pytest.mark.parametrize("split", ["ood", "id_unpermuted"])
def test_another_rule_of_a_feature_changes_the_last_values_of_its_rows(split):
    task = Raven(RavenConfig(n_features=3, n_values=5))
    base, source = (task.batch(split, index, 300) for index in (0, 1))
    exchanged = torch.arange(3) == torch.arange(300)[:, None] % 3
    rule = torch.where(exchanged, source.latents["rule"], base.latents["rule"])
    wanted = task.counterfactual(base, {"rule": rule})
    grids, expected = base.latents["values"], base.latents["values"].clone()
    for i, row in np.ndindex(300, 3):
        grid = grids[i, :, :, i % 3].tolist()
        answer = reference.answer_by_rule(rule[i, i % 3].item(), [grid[0], None, grid[row]], 5)
        expected[i, row, 2, i % 3] = -1 if answer is None else answer
    assert torch.equal(wanted.latents["values"], expected)
    assert (expected == -1).any()
    order = base.latents["permutation"]
    answers = expected[:, 2, 2].gather(1, order[:, 2])
    assert torch.equal(wanted.targets, answers)
    assert torch.equal(wanted.mask, answers >= 0)
    shown = expected.gather(3, order[:, None].expand(-1, 3, -1, -1)).flatten(1)[:, :-3]
    assert torch.equal(wanted.inputs.argmax(-1)[:, :-3], shown.clamp(min=0))
    assert torch.equal(wanted.inputs.sum(-1)[:, :-3], (shown >= 0).float())
    assert (wanted.inputs[:, -3:] == 0).all()
    assert torch.equal(wanted.latents["response_rule"], rule.gather(1, order[:, 2]))
    combinations = task._all_combinations[wanted.latents["combination"]]
    assert torch.equal(combinations, rule.sort(1).values)


@pytest.mark.parametrize("rule", [SUM, DIFFERENCE])
def test_with_the_rule_of_a_sum_all_rows_obey_it(rule):
    task = Raven(RavenConfig(n_features=2, n_values=5))
    base = task.batch("id", 0, 100)
    wanted = task.counterfactual(base, {"rule": torch.full((100, 2), rule)})
    for i, k in np.ndindex(100, 2):
        assert reference.obeys(rule, wanted.latents["values"][i, :, :, k].tolist(), 5)
    assert wanted.mask.all()


def test_values_follow_from_what_is_set_in_their_rows():
    task = Raven(RavenConfig(n_features=1, cover_rules=False))
    base = task.batch("id", 0, 500)
    grids, rule = base.latents["values"], base.latents["rule"][:, 0]
    changed = grids.clone()
    changed[:, 2, 1] = (grids[:, 2, 1] + 1) % 8
    wanted = task.counterfactual(base, {"values": changed})
    for i in range(500):
        answer = reference.answer_by_rule(rule[i].item(), changed[i, :, :, 0].tolist(), 8)
        assert wanted.mask[i, 0] == (answer is not None)
        assert wanted.targets[i, 0] == (-1 if answer is None else answer)
    assert set(rule[~wanted.mask[:, 0]].tolist()) == {DISTRIBUTE}
    # The answer itself is set: neither its rule nor what is shown matters.
    answered = grids.clone()
    answered[:, 2, 2] = 3
    wanted = task.counterfactual(base, {"values": answered})
    assert (wanted.targets == 3).all()
    assert wanted.mask.all()
    assert torch.equal(wanted.inputs, base.inputs)
    # The set of "distribute three" is that of the first row, of whichever rule it is.
    members = {"values": grids.clone(), "rule": torch.full((500, 1), DISTRIBUTE)}
    members["values"][:, 0] = torch.tensor([1, 5, 6])[:, None]
    members["values"][:, 2, :2] = torch.tensor([6, 1])[:, None]
    wanted = task.counterfactual(base, members)
    assert (wanted.targets == 5).all()
    assert wanted.mask.all()


def test_batches_made_in_advance_are_those_made_one_by_one(monkeypatch):
    """As on a CUDA device, whose stream of random numbers the CPU's stands in for here."""
    task, device = Raven(RavenConfig(n_features=2)), torch.device("cpu")
    monkeypatch.setattr(
        Raven, "_draw_cuda", lambda self, split, index, size, _: self._draw_cpu(split, index, size)
    )
    for index in (0, 1, 2, 32, 33, 70, 71, 5):
        batch, alone = task._batch_on_cuda("train", index, 4, device), task.batch("train", index, 4)
        assert torch.equal(batch.inputs, alone.inputs)
        assert torch.equal(batch.targets, alone.targets)
        for name, values in alone.latents.items():
            assert torch.equal(batch.latents[name], values), name
