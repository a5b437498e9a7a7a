"""Claims about modular networks: which results they hold for, and which contradict them."""

import json

import numpy as np
import pytest

from studies.engine.claims import judge
from studies.measures.modular_routing import OOD, SPECIAL, over_methods, without_outliers
from studies.modular_routing import SIZES, STUDY
from studies.report.names import name_of
from studies.setups.equations import MODELS, MODULAR, ROUTERS
from tests.studies.claims.modular_results import all_models, cell, made_up

CLAIMS = (*STUDY.claims, *SIZES.claims)


class AllAlike:
    def objections(self, first, second, *, of_learning=False):
        return ""


def verdicts(rows, beginning):
    """The verdicts of the one claim that begins so, or is that statement."""
    claims = [claim for claim in CLAIMS if claim.statement.startswith(beginning)]
    claims = [claim for claim in claims if claim.statement == beginning] or claims
    assert len(claims) == 1, beginning
    return judge(made_up(rows), claims, AllAlike())["verdict"].to_numpy().tolist()


def test_sources_are_the_paper_or_ours():
    """The paper says nothing about untrained modules and paths of whole tasks."""
    for claim in CLAIMS:
        is_ours = "untrained" in claim.statement or "each task" in claim.statement
        assert (claim.source == "ours") == is_ours
        assert is_ours or claim.source.startswith("Ostapenko et al. 2022, ")


END_TO_END = {
    "The structural oracle reaches": 1,
    "No other router reaches": 3,
    "Cross-attention specializes more than: concatenation": 1,
    "Cross-attention specializes more than: encoder": 1,
    "Cross-attention has a lower OOD loss than: concatenation": 1,
    "Cross-attention has a lower OOD loss than: encoder": 1,
    "The OOD loss of the monolithic network exceeds that of: structural": 1,
    "The OOD loss of the monolithic network exceeds that of: encoder": 1,
    "The best path of each sample has a low OOD": 4,
    "The OOD loss of the best path": 3,
    "The encoder specializes less than: structural": 1,
    "The encoder specializes less than: cross": 1,
    "The encoder specializes less than: conc": 1,
    "The encoder's choice depends on the digits more than that of: structural": 1,
    "The encoder's choice depends on the digits more than that of: cross": 1,
    "The encoder's choice depends on the digits more than that of: conc": 1,
    "The encoder's collapse score": 1,
    "No method collapses": 4,
    "The best path of each sample has a lower": 3,
    "The best path of each task": 3,
}
"""The claims about one run of all models, with the number of their comparisons."""


@pytest.mark.parametrize("beginning", END_TO_END)
def test_claims_about_all_models_hold_where_they_should(beginning):
    assert verdicts(all_models(), beginning) == ["holds"] * END_TO_END[beginning]


def test_claims_about_other_runs_are_not_judged():
    found = judge(made_up(all_models()), CLAIMS, AllAlike())["verdict"].to_numpy()
    assert set(found) == {"holds", "not run"}
    # Two more exceed the monolithic network.
    assert (found == "holds").sum() == sum(END_TO_END.values()) + 2


@pytest.mark.parametrize(
    ("model", "change", "beginning"),
    [
        ("structural_oracle", {"ood": 0.2}, "The structural oracle reaches"),
        ("structural_oracle", {"specialization": 0.8}, "The structural oracle reaches"),
        ("encoder", {"ood": 0.001, "specialization": 0.99}, "No other router reaches"),
        (
            "concatenation",
            {"specialization": 0.8},
            "Cross-attention specializes more than: concatenation",
        ),
        ("encoder", {"ood": 0.1}, "Cross-attention has a lower OOD loss than: encoder"),
        (
            "encoder",
            {"ood": 0.41},
            "The OOD loss of the monolithic network exceeds that of: encoder",
        ),
        ("concatenation", {"sample": 0.04}, "The best path of each sample has a low OOD"),
        ("concatenation", {"sample": 0.04}, "The OOD loss of the best path"),
        ("concatenation", {"specialization": 0.1}, "The encoder specializes less than: conc"),
        (
            "structural_oracle",
            {"digits": 0.6},
            "The encoder's choice depends on the digits more than that of: structural",
        ),
        ("encoder", {"collapse": 0.6}, "The encoder's collapse score"),
        ("concatenation", {"attainable": 0.3}, "No method collapses"),
        ("concatenation", {"null_sample": 0.0005}, "The best path of each sample has a lower"),
        ("cross_attention", {"task": 0.04}, "The best path of each task"),
    ],
)
def test_and_are_contradicted_when_one_value_is_another(model, change, beginning):
    rows = [cell(name, **(change if name == model else {})) for name in MODELS]
    expected = ["holds"] * (END_TO_END[beginning] - 1)
    assert sorted(verdicts(rows, beginning)) == sorted([*expected, "contradicted"])


@pytest.mark.parametrize(
    "beginning", ["The OOD loss of the best path", "The best path of each task"]
)
def test_a_network_that_composes_has_no_loss_for_its_path_to_explain(beginning):
    composes = {"routed": 0.01, "sample": 0.009, "task": 0.009}
    rows = [cell(name, **(composes if name == "encoder" else {})) for name in MODELS]
    assert verdicts(rows, beginning) == ["holds"] * 2
    fails = composes | {"routed": 0.06, "sample": 0.05, "task": 0.05}
    rows = [cell(name, **(fails if name == "encoder" else {})) for name in MODELS]
    assert sorted(verdicts(rows, beginning)) == ["contradicted", "holds", "holds"]


def test_claims_about_true_modules_are_about_true_modules():
    rows = all_models(pool="operations")
    tight = cell("encoder", pool="operations", selection_bottleneck=1)
    tight |= {"specialization": 0.9, "ood": 0.05}
    assert verdicts(rows, "With true modules the structural oracle") == ["holds"]
    assert verdicts(rows, "With true modules no other") == ["holds"] * 3
    assert verdicts([*rows, tight], "With true modules no other") == ["holds"] * 4
    assert verdicts(rows, "No other router") == ["not run"]


def test_a_second_place_is_claimed_against_each_rival():
    name = "With true modules the encoder with selection bottleneck"
    rivals = {
        (model, tight): name_of(model) + ", selection bottleneck" * tight
        for model in ROUTERS
        for tight in (0, 1)
        if (model, tight) != ("encoder", 1)
    }
    rows = {
        (model, tight): cell(model, pool="operations", selection_bottleneck=tight)
        for model in ROUTERS
        for tight in (0, 1)
    }
    rows["encoder", 1] |= {"specialization": 0.9, "ood": 0.05}
    oracle = cell("structural_oracle", pool="operations")
    for what in (f"{name} specializes more than", f"{name} has a lower OOD loss than"):
        own = [claim for claim in CLAIMS if claim.statement.startswith(what)]
        assert {claim.statement.split(": ")[1] for claim in own} == {*rivals.values()}
        for rival, words in rivals.items():
            statement = f"{what}: {words}"
            assert verdicts([rows["encoder", 1]], statement) == ["not run"]
            assert verdicts([oracle, *rows.values()], statement) == ["holds"]
            better = rows | {rival: rows[rival] | {"specialization": 0.95, "ood": 0.01}}
            assert verdicts([oracle, *better.values()], statement) == ["contradicted"]


def test_and_not_against_one_that_was_not_trained():
    """The least of the values of several conditions would not say whose it is."""
    rows = [cell(model, n_layers=1, id=0.2) for model in MODULAR]
    rows += [cell(model, pool="operations", selection_bottleneck=1) for model in ROUTERS]

    class OneUntrained:
        def objections(self, first, second, *, of_learning=False):
            conditions = [side for side in (first, second) if side is not None]
            untrained = any(side.values["model"] == "concatenation" for side in conditions)
            return "not trained" if untrained and not of_learning else ""

    found = judge(made_up(rows), CLAIMS, OneUntrained()).to_pandas()
    second = found[found["statement"].str.startswith("With true modules the encoder with")]
    one_layer = found[found["statement"].str.startswith("With one layer the encoder")]
    refused = second["statement"].str.endswith("concatenation, selection bottleneck")
    assert (second[refused]["reason"] == "not trained").all()
    assert "not trained" not in {*second[~refused]["reason"], *one_layer["reason"]}


def test_cross_attention_is_compared_with_all_methods_of_others():
    tight = [
        cell(model, objective=objective, selection_bottleneck=value)
        for model in ("encoder", "concatenation")
        for objective in ("sampled", "all_paths")
        for value in (0, 1)
    ]
    found = judge(made_up([cell("cross_attention"), *tight]), CLAIMS, AllAlike()).to_pandas()
    held = found[found["verdict"] == "holds"]["statement"]
    for what in ("specializes more", "has a lower OOD loss"):
        assert held.str.startswith(f"Cross-attention {what} than: ").sum() == len(tight)


def test_methods_are_ranked_if_there_are_more_than_routers():
    statement = "Among methods low OOD loss"
    assert verdicts(all_models(), statement) == ["not run"]
    more = [cell(name, objective="all_paths") for name in MODULAR]
    assert verdicts(all_models() + more, statement) == ["holds"]
    turned = [row | {"ood": row["specialization"]} for row in all_models() + more]
    assert verdicts(turned, statement) == ["contradicted"]


def test_claims_about_all_paths():
    lower = [cell(name, objective="all_paths", id=0.0005) for name in MODULAR]
    assert verdicts(all_models() + lower, "All paths lower") == ["holds"] * 3
    assert verdicts(all_models() + lower, "All paths do not lower") == ["contradicted"]
    alike = [cell(name, objective="all_paths") for name in MODULAR]
    assert verdicts(all_models() + alike, "All paths do not lower") == ["holds"]
    higher = [cell(name, objective="all_paths", id=0.1) for name in MODULAR]
    assert verdicts(all_models() + higher, "All paths lower") == ["contradicted"] * 3
    assert verdicts(all_models() + higher, "All paths do not lower") == ["holds"]

    # Half of the specialization, and about the same OOD loss.
    both = [cell(name, objective="all_paths") for name in ("cross_attention", "encoder")]
    assert verdicts(both, "On all paths, encoder and") == ["holds"]
    assert verdicts(both, "On all paths, cross-attention") == ["holds"]
    both[1] |= {"ood": 0.7, "specialization": 0.6}
    assert verdicts(both, "On all paths, encoder and") == ["contradicted"]
    assert verdicts(both, "On all paths, cross-attention") == ["contradicted"]
    # The claims are not about paths that are sampled.
    both = [row | {"objective": "sampled"} for row in both]
    assert verdicts(both, "On all paths, encoder and") == ["not run"]


def test_claims_about_the_selection_bottleneck_are_about_learned_modules():
    statement = "The selection bottleneck raises"
    rows = [cell("encoder"), cell("encoder", selection_bottleneck=1, specialization=0.7)]
    assert verdicts(rows, statement) == ["holds"]
    assert verdicts([row | {"pool": "operations"} for row in rows], statement) == ["not run"]
    rows[1]["specialization"] = 0.2
    assert verdicts(rows, statement) == ["contradicted"]


def by_operators(models, **values):
    """Conditions with the values at each |S|: `by_operators(["encoder"], ood={3: .4, 5: .3})`."""
    sizes = next(iter(values.values()))
    return [
        cell(model, n_operators=n, **{name: of_size[n] for name, of_size in values.items()})
        for model in models
        for n in sizes
    ]


def test_claims_about_the_number_of_operations():
    rows = by_operators(["encoder", "monolithic"], ood={3: 0.4, 5: 0.3})
    assert verdicts(rows, "OOD loss falls from |S| = 3 to 5") == ["holds"] * 2
    rows = by_operators(["encoder"], ood={3: 0.2, 5: 0.3})
    assert verdicts(rows, "OOD loss falls from |S| = 3 to 5") == ["contradicted"]

    rows = by_operators(["encoder"], ood={5: 0.3, 15: 0.4})
    assert verdicts(rows, "From |S| = 5 to 15") == ["holds"]
    assert verdicts(rows, "OOD loss rises from |S| = 5") == ["holds"]
    rows = by_operators(["encoder"], ood={5: 0.3, 15: 0.1})
    assert verdicts(rows, "From |S| = 5 to 15") == ["contradicted"]
    assert verdicts(rows, "OOD loss rises from |S| = 5") == ["contradicted"]

    rows = by_operators(MODELS, ood={5: 0.3, 15: 0.01})
    assert verdicts(rows, "At |S| = 15 the structural") == ["holds"]
    assert verdicts(rows, "At |S| = 15 no other") == ["contradicted"] * 4
    rows = by_operators(MODELS, ood={5: 0.3, 15: 0.3})
    assert verdicts(rows, "At |S| = 15 the structural") == ["contradicted"]
    assert verdicts(rows, "At |S| = 15 no other") == ["holds"] * 4

    models = ("structural_oracle", "encoder")
    rows = by_operators(models, specialization={10: 0.9, 15: 0.7})
    assert verdicts(rows, "Specialization falls") == ["holds"]
    assert verdicts(rows, "The structural oracle's specialization") == ["contradicted"]
    rows = by_operators(models, specialization={10: 0.9, 15: 0.92})
    assert verdicts(rows, "Specialization falls") == ["contradicted"]
    assert verdicts(rows, "The structural oracle's specialization") == ["holds"]


def by_points(model, **values):
    """A condition with 1,000 and with 20,000 points: `by_points("encoder", ood=(0.4, 0.3))`."""
    few, many = ({name: pair[number] for name, pair in values.items()} for number in (0, 1))
    return [cell(model, n_points=1000, **few), cell(model, n_points=20_000, **many)]


def test_claims_about_the_number_of_points():
    down, up = (0.4, 0.3), (0.3, 0.4)
    statement = "More points lower the monolithic"
    assert verdicts(by_points("monolithic", ood=down), statement) == ["holds"]
    assert verdicts(by_points("monolithic", ood=up), statement) == ["contradicted"]
    for model in ("structural_oracle", "cross_attention"):
        rows = by_points(model, ood=down, specialization=up)
        for statement in ("More points raise specialization", "More points lower the OOD loss"):
            assert verdicts(rows, statement) == ["holds"]
        rows = by_points(model, ood=up, specialization=down)
        for statement in ("More points raise specialization", "More points lower the OOD loss"):
            assert verdicts(rows, statement) == ["contradicted"]
    rows = by_points("concatenation", ood=up, specialization=down)
    assert verdicts(rows, "More points lower the specialization of conc") == ["holds"]
    assert verdicts(rows, "More points raise the OOD loss of conc") == ["holds"]
    assert verdicts(rows, "More points raise specialization") == ["not run"]
    rows = [
        row | {"objective": "all_paths", "selection_bottleneck": value}
        for value in (0, 1)
        for row in by_points("encoder", ood=down, specialization=down)
    ]
    assert verdicts(rows, "More points lower the specialization of the enc") == ["holds"] * 2
    assert verdicts(rows, "More points do not raise the OOD loss of the enc") == ["holds"] * 2
    raised = [row | {"ood": 0.5} if row["n_points"] > 1000 else row for row in rows]
    assert (
        verdicts(raised, "More points do not raise the OOD loss of the enc") == ["contradicted"] * 2
    )
    rows = [row | {"objective": "sampled"} for row in rows]
    assert verdicts(rows, "More points lower the specialization of the enc") == ["not run"]

    small = [row | {"n_operators": 3} for row in by_points("encoder", id=up)]
    assert verdicts(small, "With |S| = 3 more points raise") == ["holds"]
    statement = "With |S| = 5 more points do not raise"
    for values, verdict in ((down, "holds"), ((0.3, 0.3), "holds"), (up, "contradicted")):
        assert verdicts(by_points("encoder", id=values), statement) == [verdict]


def test_functional_bottlenecks_are_compared_by_collapse():
    rows = [
        cell("encoder", collapse=0.76),
        # The OOD loss has no part in it.
        cell("encoder", functional_bottleneck="attention", collapse=0.74, ood=5.0),
        cell("encoder", functional_bottleneck="none", collapse=0.7),
    ]
    same, none = "Functional bottlenecks", "Without functional bottleneck"
    assert verdicts(rows, same) == ["holds"]
    assert verdicts(rows, none) == ["holds"]
    rows[1]["collapse"], rows[2]["collapse"] = 0.5, 0.8
    assert verdicts(rows, same) == ["contradicted"]
    assert verdicts(rows, none) == ["contradicted"]
    rows[2]["collapse"] = 0.0
    assert verdicts(rows, none) == ["holds"]
    concatenation = [row | {"model": "concatenation"} for row in rows]
    assert verdicts(concatenation, same) == verdicts(concatenation, none) == ["not run"]


def test_networks_of_one_layer_are_left_to_claims_about_them():
    rows = [cell(name, n_layers=1, id=0.2) for name in MODULAR]
    assert verdicts(rows, "No other router") == ["not run"]
    assert verdicts(rows, "The best path of each sample has a low OOD") == ["not run"]
    assert verdicts(rows, "With one layer cross-attention") == ["holds"]
    rows[-1]["id"] = 0.1
    assert rows[-1]["model"] == "encoder"
    encoder = "With one layer the encoder has a lower ID loss than"
    for rival in ("structural oracle", "cross-attention", "concatenation"):
        assert verdicts(rows, f"{encoder}: {rival}") == ["holds"]
    rows[-1]["id"] = 0.3
    for rival in ("structural oracle", "cross-attention", "concatenation"):
        assert verdicts(rows, f"{encoder}: {rival}") == ["contradicted"]
    rows = [cell(name, n_layers=1, id=0.01) for name in ROUTERS]
    assert verdicts(rows, "With one layer cross-attention") == ["contradicted"]


def test_keys_are_compared_by_their_losses():
    rows = [cell("encoder"), cell("encoder", module_keys="projected", id=0.1, ood=0.2)]
    assert verdicts(rows, "Keys that share a matrix give a higher ID") == ["holds"]
    assert verdicts(rows, "Keys that share a matrix give a higher OOD") == ["contradicted"]


# Readings


def test_values_over_methods_are_those_of_the_same_seed_and_sizes():
    rows = [*all_models(), *all_models(n_points=100, ood=0.7)]
    result = made_up(rows, n_seeds=2)
    found = over_methods(min, OOD.among(ROUTERS)).values(result)
    n_points, seed = (result["scores"][name].to_numpy() for name in ("n_points", "seed"))
    is_modular = result["scores"]["model"].to_numpy() != "monolithic"
    expected = np.where(n_points == 100, 0.7, 0.2) * (1 + 0.01 * seed)
    np.testing.assert_allclose(found[is_modular], expected[is_modular])
    counted = over_methods(lambda x, y: len(x), OOD, SPECIAL).values(result)
    assert (counted[is_modular] == len(MODULAR)).all()


def test_methods_are_compared_at_their_chosen_settings():
    """As if the number of points were tuned, with 100 chosen for the encoder alone."""
    other = [cell(model, n_points=100, ood=0.05) for model in MODULAR if model != "encoder"]
    rows = [*all_models(), *other, cell("encoder", n_points=100, ood=0.1)]
    result = made_up(rows, n_seeds=2)
    axes = json.loads(result.attrs["axes"]) | {"tuned": ["n_points"]}
    result.attrs["axes"] = json.dumps(axes)
    scores = result["scores"]
    model, n_points, seed = (scores[name].to_numpy() for name in ("model", "n_points", "seed"))
    scores["chosen"].values[:] = is_chosen = (n_points == 100) == (model == "encoder")
    found = over_methods(min, OOD.among(ROUTERS)).values(result)
    shown = is_chosen & (model != "monolithic")
    np.testing.assert_allclose(found[shown], 0.1 * (1 + 0.01 * seed[shown]))


def test_outliers_are_those_of_grubbs_test():
    # The table of critical values at 5%, two sides: 1.715 for 5 values, 1.887 for 6.
    for values, n_outliers in (([1.0, 1.1, 0.9, 1.05, 9.0], 1), ([1.0, 1.4, 0.9, 1.3, 2.0], 0)):
        distance = abs(values[-1] - np.mean(values)) / np.std(values, ddof=1)
        assert (distance > 1.715) == (n_outliers == 1)
        result = made_up(all_models(), n_seeds=5)
        is_encoder = result["scores"]["model"].to_numpy() == "encoder"
        result["scores"]["loss"].values[is_encoder, 1, 0] = values
        kept = without_outliers(OOD).values(result)
        assert np.isnan(kept).sum() == n_outliers
        if n_outliers:
            assert np.flatnonzero(np.isnan(kept)) == np.flatnonzero(is_encoder)[-1]


def test_specialization_is_that_within_layers():
    tree = made_up(all_models())
    values = tree["specialization"]["specialization"]
    values.loc[{"layer": "0"}], values.loc[{"layer": "1"}] = 0.9, 0.7
    values.loc[{"layer": "pooled"}] = 0.1
    np.testing.assert_allclose(SPECIAL.values(tree), 0.8)
