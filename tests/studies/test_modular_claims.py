"""The verdicts on figures that were made up, so that it is known which claims hold."""

import numpy as np
import pytest

from studies.modular_claims import (
    CHECKS,
    MODULAR,
    NOT_RUN,
    ROUTERS,
    check_claims,
    selected_cells,
    summary,
)

USUAL = {
    "objective": "sampled",
    "selection_bottleneck": 0,
    "functional_bottleneck": "oracle",
    "module_keys": "direct",
    "pool": "mlp",
    "n_layers": 2,
    "n_operators": 5,
    "n_points": 5000,
    "learning_rate": 1e-3,
    "seed": 0,
}
ROUTED = {
    "id": 0.05,
    "ood": 0.3,
    "specialization": 0.5,
    "specialization_by_layer": 0.6,
    "collapse": 0.6,
    "collapse_attainable": 0.8,
    "best_sample": 0.001,
    "best_task": 0.01,
    "routed": 0.3,
    "mean": 0.6,
    "null_sample": 0.1,
    "null_task": 0.4,
}
NAN = dict.fromkeys(ROUTED, np.nan)
THREE = (
    "Only the structural oracle reaches",
    "Every modular network beats",
    "The best path of each sample",
)


def cell(model, **changes):
    figures = dict(ROUTED)
    if model == "structural_oracle":
        figures |= {"id": 0.001, "ood": 0.002, "specialization_by_layer": 1.0}
    if model == "monolithic":
        figures = NAN | {"id": 0.01, "ood": 0.4}
    row = {"model": model} | USUAL | figures | changes
    return row | {f"{split}_share": row[split] / 0.5 for split in ("id", "ood")}


def verdict(cells, beginning):
    (claim,) = [one for one in check_claims(cells) if one.statement.startswith(beginning)]
    return claim.verdict


def all_models(**changes):
    return [cell(model, **changes) for model in (*MODULAR, "monolithic")]


def test_the_first_three_claims_hold_where_they_should():
    claims = {claim.statement: claim for claim in check_claims(all_models())}
    assert len(claims) == len(CHECKS)
    for beginning in (*THREE, "So is the best path of each task"):
        assert verdict(all_models(), beginning) == "holds"
    others = [claim.verdict for claim in claims.values()][4:]
    assert others == [NOT_RUN] * len(others)


@pytest.mark.parametrize(
    ("model", "change", "beginning"),
    [
        ("encoder", {"ood": 0.001, "specialization_by_layer": 0.99}, THREE[0]),
        ("structural_oracle", {"ood": 0.2}, THREE[0]),
        ("structural_oracle", {"specialization_by_layer": 0.8}, THREE[0]),
        ("concatenation", {"ood": 0.41}, THREE[1]),
        ("structural_oracle", {"ood": 0.41}, THREE[1]),
        ("concatenation", {"best_sample": 0.04}, THREE[2]),
        ("concatenation", {"null_sample": 0.0005}, THREE[2]),
        ("cross_attention", {"best_task": 0.04}, "So is the best path of each task"),
    ],
)
def test_and_do_not_hold_when_one_figure_is_another(model, change, beginning):
    cells = [cell(name, **(change if name == model else {})) for name in (*MODULAR, "monolithic")]
    assert verdict(cells, beginning) == "does not hold"


def test_seeds_are_averaged():
    cells = [*all_models(), cell("concatenation", seed=1, ood=0.49)]
    cells += [cell("monolithic", seed=1)]
    assert verdict(cells, THREE[1]) == "holds"
    cells += [cell("concatenation", seed=2, ood=0.49)]
    assert verdict(cells, THREE[1]) == "does not hold"


def test_every_condition_counts_once():
    worse = [cell(name, n_points=150, ood=0.5) for name in ("concatenation",)]
    rest = [cell(name, n_points=150) for name in (*MODULAR, "monolithic") if name not in ROUTERS[1]]
    assert verdict(all_models() + rest + worse, THREE[1]) == "holds in 1 of 2"


def test_the_structural_oracle_stands_beside_routers_with_the_bottleneck():
    with_it = [cell(name, selection_bottleneck=1) for name in ROUTERS]
    better = [cell(name, selection_bottleneck=1, ood=0.45) for name in ROUTERS]
    assert verdict(all_models() + with_it, THREE[1]) == "holds"
    assert verdict(all_models() + better, THREE[1]) == "holds in 1 of 2"


def test_further_claims():
    encoder = [cell("encoder"), cell("encoder", selection_bottleneck=1, specialization=0.7)]
    assert verdict(encoder, "The selection bottleneck") == "holds"
    encoder[1]["specialization"] = 0.4
    assert verdict(encoder, "The selection bottleneck") == "does not hold"

    lower = [cell(name, objective="all_paths", id=0.01) for name in ROUTERS]
    oracle = [cell("structural_oracle", objective="all_paths", id=0.01)]
    assert verdict(all_models() + lower + oracle, "All paths lower") == "holds"
    higher = [cell(name, objective="all_paths", id=0.1) for name in ROUTERS]
    assert verdict(all_models() + higher + oracle, "All paths lower") == "holds in 1 of 4"

    three = [cell("encoder", n_operators=3, ood=0.4)]
    assert verdict([cell("encoder"), *three], "OOD loss falls") == "holds"
    assert verdict([cell("encoder", ood=0.5), *three], "OOD loss falls") == "does not hold"

    functional = [
        cell("encoder"),
        cell("encoder", functional_bottleneck="attention", ood=0.5),
        cell("encoder", functional_bottleneck="none", collapse=0.1),
    ]
    assert verdict(functional, "Functional bottlenecks") == "holds"
    assert verdict(functional, "Without functional bottleneck") == "holds"
    functional[1]["ood"], functional[2]["collapse"] = 0.7, 0.4
    assert verdict(functional, "Functional bottlenecks") == "does not hold"
    assert verdict(functional, "Without functional bottleneck") == "does not hold"

    one = [cell(name, n_layers=1, id=0.2) for name in ROUTERS]
    assert verdict(one, "With one layer") == "does not hold"
    one[2] = cell("encoder", n_layers=1, id=0.01)
    assert verdict(one, "With one layer") == "holds"


def test_the_learning_rate_is_that_of_the_least_loss_on_id():
    cells = [
        cell("encoder", learning_rate=rate, seed=seed, id=loss, ood=1 - loss)
        for rate, losses in ((1e-3, (0.1, 0.3)), (1e-2, (0.15, 0.2)))
        for seed, loss in enumerate(losses)
    ]
    cells += [cell("monolithic")]
    kept = selected_cells(cells)
    assert [(row["model"], row["learning_rate"]) for row in kept] == [
        ("encoder", 1e-2),
        ("encoder", 1e-2),
        ("monolithic", 1e-3),
    ]
    means = summary(kept)
    assert means["learning_rate"].to_numpy().tolist() == [1e-2, 1e-3]
    assert means["mean"].sel(figure="id").to_numpy() == pytest.approx([0.175, 0.01])
    assert np.isnan(means["mean"].sel(figure="specialization").to_numpy()[1])


def test_outliers_are_filtered_and_counted():
    values = [0.1, 0.11, 0.09, 0.1, 5.0]
    means = summary([cell("encoder", seed=seed, ood=ood) for seed, ood in enumerate(values)])
    ood = means.isel(condition=0).sel(figure="ood")
    assert ood["mean"] == pytest.approx(np.mean(values))
    assert ood["mean_filtered"] == pytest.approx(0.1)
    assert ood["outliers"] == 1
    assert (ood["lowest"], ood["highest"]) == (0.09, 5.0)


def test_what_was_measured_is_told_apart():
    cells = [
        cell("encoder", objective=objective, selection_bottleneck=flag, specialization=value)
        for objective, values in (("sampled", (0.5, 0.7)), ("all_paths", (0.6, 0.4)))
        for flag, value in enumerate(values)
    ]
    (claim,) = [one for one in check_claims(cells) if "selection bottleneck" in one.statement]
    assert claim.measured == "sampled: 0.50 to 0.70; all paths: 0.60 to 0.40"
    assert claim.verdict == "holds in 1 of 2"
