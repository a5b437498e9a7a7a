"""Measures of models of Raven matrices: what their latent code knows, and whether it is used.

The latent code of an answer token is its attention, with all heads, to two tokens of its row. In
the splits without permuted columns these are the tokens of the same feature; in the others they are
the corresponding tokens, which the model must find.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import xarray as xr
from torch import Tensor

import probes
import tasks
from studies.engine import Trained

PROBED = FAMILIAR, HELD_OUT = ("id_unpermuted", "ood_unpermuted")
"""Splits without permuted columns: the tokens that determine a feature's answer are known."""

PERMUTED = ("id", "ood")
"""Splits with permuted columns."""

SAMPLES = ("example", "feature")
"""Dims of samples: each feature of an instance has its own rule and its own code."""


def pair_shown(values: xr.DataArray) -> xr.DataArray:
    """The values in the first and second `column` as one number: the type of the control task.

    They are what a code's tokens show, and no rule follows from them alone.
    """
    return 2**16 * values.isel(column=0, drop=True) + values.isel(column=1, drop=True)


def codes_of(model: Any, batches: Iterable[tasks.Batch], n_features: int) -> xr.Dataset:
    """The latent codes of a model, `code` [example, layer, feature, key, head], with labels.

    The query is feature k of the last panel, the keys feature k of the two panels before it. The
    labels are the `rule` and the `value` that is asked for, [example, feature]; `shown` is the
    values of the keys' tokens.
    """
    code = probes.latent_code(*tasks.raven_last_row(n_features), dims=("feature", "key"))
    dims = {"rule": SAMPLES, "values": ("example", "row", "column", "feature")}
    data = probes.capture(model, batches, {"code": code}, latent_dims=dims)
    row = data["values"].isel(row=2)
    data = data.assign(value=row.isel(column=2), shown=pair_shown(row))
    return data[["code", "rule", "value", "shown"]].assign_coords(key=["first", "second"])


def numbered(data: xr.Dataset) -> xr.Dataset:
    """Number the labels of all dims without a coordinate, so that models of any size can be joined.

    The sizes of dims such as `head` and `feature` differ between cells.
    """
    return data.assign_coords({dim: range(n) for dim, n in data.sizes.items() if dim not in data})


def ceiling(trained: Trained, n: int = 4096) -> xr.Dataset:
    """The accuracy of the ideal observer of the panels, who knows the splits.

    Args:
        trained: the trained model; only its task is used.
        n: instances of each split.
    """
    return tasks.raven_ceilings(trained.setup.task, trained.setup.all_splits, n)


def decoding(trained: Trained, n: int = 2000) -> xr.Dataset:
    """Linear decoding of each feature's rule from its latent code, fitted on training combinations.

    Args:
        trained: the trained model and its untrained control.
        n: instances for fitting, and for scoring on each split.
    """
    fit = list(trained.batches(FAMILIAR, n))
    tests = {split: list(trained.batches(split, n)) for split in PROBED}

    def codes(model: Any) -> tuple[xr.Dataset, dict[str, xr.Dataset]]:
        codes_on = partial(codes_of, model, n_features=trained.setup.task.n_features)
        return codes_on(fit), {split: codes_on(batches) for split, batches in tests.items()}

    decoded = probes.decode(
        *codes(trained.model),
        samples=SAMPLES,
        cells=("layer", "key"),
        types="shown",
        untrained=codes(trained.untrained),
        seed=trained.seed,
    )
    rules = [tasks.RAVEN_RULES[int(rule)] for rule in decoded["true"].to_numpy()]
    return decoded.assign_coords(true=rules, predicted=rules)


def interchange(trained: Trained, n_pairs: int = 500) -> xr.Dataset:
    """Whether the code is used: codes, or whole patterns, of one instance are patched into another.

    Every pair has a base A, a source B and a feature. Outcomes: the answer of B's rule on A's
    panels, and A's own answer; see `tasks.raven_pairs`.

    Args:
        trained: the trained model.
        n_pairs: pairs of each condition.
    """
    rates: list[xr.Dataset] = []
    for split in PROBED:
        # One candidate in eight has the same rule.
        base, source = (trained.batch(split, 16 * n_pairs) for _ in range(2))
        pairs = tasks.raven_pairs(trained.task, base, source, n_pairs)
        answer = partial(torch.argmax, dim=-1)
        rates.append(probes.interchange_pairs(trained.model, pairs, answer=answer))
    return xr.concat(rates, xr.Variable("split", list(PROBED)), combine_attrs="drop_conflicts")


def projection(trained: Trained, n: int = 150) -> xr.Dataset:
    """The codes of held-out combinations in the plane, by PCA and t-SNE: each layer's, and all.

    Args:
        trained: the trained model.
        n: number of instances.
    """
    data = codes_of(trained.model, trained.batches(HELD_OUT, n), trained.setup.task.n_features)
    code = data.set_coords(["rule", "value"])["code"]
    codes = {str(layer): code.sel(layer=[layer]) for layer in code["layer"].to_numpy()}
    codes |= {"all": code}
    project = partial(probes.project, method=("pca", "tsne"), samples=SAMPLES, seed=trained.seed)
    points = xr.concat(
        [project(part) for part in codes.values()],
        xr.Variable("layer", list(codes)),
        data_vars="all",
        combine_attrs="drop_conflicts",
    ).reset_coords(["rule", "value"])
    points["rule"].attrs["long_name"] = "rule, an index of the rules' names"
    points["value"].attrs["long_name"] = "value that is asked for"
    return numbered(points)


def similarity(trained: Trained, n: int = 2000) -> xr.Dataset:
    """Cosine similarity of the mean codes of rules, on held-out combinations.

    `related`: the similarity of sum and difference, minus the mean of the other pairs of rules.

    Args:
        trained: the trained model and its untrained control.
        n: number of instances.
    """
    batches = list(trained.batches(HELD_OUT, n))
    compare = partial(probes.compare_means, samples=SAMPLES, cells=("layer", "key"))
    trained_codes, untrained = (
        compare(codes_of(model, batches, trained.setup.task.n_features), seed=trained.seed)
        for model in (trained.model, trained.untrained)
    )
    untrained = untrained.sel(control=["observed"]).assign_coords(control=["untrained"])
    models = [trained_codes, untrained]
    both = xr.concat(models, "control", data_vars="all", combine_attrs="drop_conflicts")
    names = [tasks.RAVEN_RULES[rule] for rule in both["first"].to_numpy()]
    # A small split may lack a rule.
    everything = {dim: list(tasks.RAVEN_RULES) for dim in ("first", "second")}
    both = both.assign_coords(first=names, second=names).reindex(everything)
    a, b = tasks.RAVEN_RULES.index("sum"), tasks.RAVEN_RULES.index("difference")
    is_other = np.tri(len(tasks.RAVEN_RULES), k=-1, dtype=bool)
    is_other[b, a] = False
    others = both["similarity"].where(xr.DataArray(is_other, dims=("first", "second")))
    gain = both["similarity"].isel(first=b, second=a, drop=True) - others.mean(("first", "second"))
    about = "similarity of sum and difference, minus the mean of other pairs of rules"
    return both.assign(related=gain.assign_attrs(long_name=about))


# Permuted columns


def permuted_weights(model: Any, batches: Iterable[tasks.Batch], n_features: int) -> xr.Dataset:
    """The attention of answer tokens to the tokens of their row, on a split with permuted columns.

    Returns:
        `weight` [example, layer, feature, column, token, head], where `feature` numbers the answer
        tokens and `token` those of the panel in the first or second column;
        `value` [example, column, token], what those tokens show; `corresponding` [example,
        feature, column], the token with the same feature; `rule` [example, feature].
    """

    def reduce(pattern: Tensor) -> Tensor:
        row = pattern[:, :, -n_features:, 6 * n_features : 8 * n_features]
        return row.unflatten(-1, (2, n_features)).permute(0, 2, 3, 4, 1)

    dims = ("example", "feature", "column", "token", "head")
    weight = probes.Quantity("blocks.*.attn.hook_pattern", dims, reduce=reduce)
    order = {
        "permutation": ("example", "column_", "token_"),
        "response_rule": SAMPLES,
        "values": ("example", "row_", "column_", "feature_"),
    }
    data = probes.capture(model, batches, {"weight": weight}, latent_dims=order)
    permutation = torch.from_numpy(data["permutation"].to_numpy())
    corresponding = tasks.raven_correspondence(permutation)[:, :, :2].numpy()
    last_row = torch.from_numpy(data["values"].isel(row_=2, column_=slice(2)).to_numpy())
    value = last_row.gather(-1, permutation[:, :2]).numpy()
    return xr.Dataset(
        {
            "weight": data["weight"],
            "value": (("example", "column", "token"), value),
            "corresponding": ((*SAMPLES, "column"), corresponding),
            "rule": data["response_rule"],
        },
        {"column": ["first", "second"]},
    )


def pointing(trained: Trained, n: int = 1000) -> xr.Dataset | None:
    """How often the largest attention weight of an answer token is on the corresponding token.

    Among the tokens of each panel of the first and second column, beside how often it is on the
    token at the same position, by layer and head; for tokens whose two targets differ.

    Args:
        trained: the trained model and its untrained control.
        n: instances of each split.
    """
    n_features = trained.setup.task.n_features
    if n_features == 1:
        return None

    def strongest(pattern: Tensor) -> Tensor:
        panels = pattern[:, :, -n_features:].abs().unflatten(-1, (3, 3, n_features))
        return panels[..., :2, :].argmax(-1)

    dims = ("example", "head", "feature", "row", "column")
    quantity = probes.Quantity("blocks.*.attn.hook_pattern", dims, reduce=strongest)
    order = {"permutation": ("example", "column_", "token_")}

    def score(model: Any, batches: Iterable[tasks.Batch]) -> xr.Dataset:
        data = probes.capture(model, batches, {"strongest": quantity}, latent_dims=order)
        permutation = torch.from_numpy(data["permutation"].to_numpy())
        corresponding = tasks.raven_correspondence(permutation)[:, :, :2].numpy()
        targets = {
            "corresponding": xr.DataArray(corresponding, dims=(*SAMPLES, "column")),
            "same position": xr.DataArray(np.arange(n_features), dims="feature"),
        }
        labels = {"row": ["first", "second", "third"], "column": ["first", "second"]}
        return probes.score_pointing(
            data["strongest"].assign_coords(labels),
            targets,
            n_candidates=n_features,
            samples=SAMPLES,
            seed=trained.seed,
        )

    results = []
    for split in PERMUTED:
        batches = list(trained.batches(split, n))
        untrained = score(trained.untrained, batches).sel(control=["observed"])
        both = [score(trained.model, batches), untrained.assign_coords(control=["untrained"])]
        results.append(xr.concat(both, "control", data_vars="all", combine_attrs="drop_conflicts"))
    splits = xr.Variable("split", list(PERMUTED))
    scores = xr.concat(results, splits, data_vars="all", combine_attrs="drop_conflicts")
    return numbered(cast(xr.Dataset, scores))


def permuted(trained: Trained, n: int = 2000) -> xr.Dataset:
    """Linear decoding of rules on splits with permuted columns, fitted on training combinations.

    `tokens`: the code is the answer token's attention to the `corresponding` tokens of its row, or
    to those at the `same position`.

    Args:
        trained: the trained model and its untrained control.
        n: instances for fitting, and for scoring on each split.
    """
    n_features = trained.setup.task.n_features
    fit, *tests = (list(trained.batches(split, n)) for split in ("id", *PERMUTED))

    def codes(model: Any, tokens: str) -> tuple[xr.Dataset, dict[str, xr.Dataset]]:
        parts = []
        for batches in (fit, *tests):
            data = permuted_weights(model, batches, n_features)
            position = xr.DataArray(np.arange(n_features), dims="feature")
            at = data["corresponding"] if tokens == "corresponding" else position
            selected = data[["weight", "value"]].isel(token=at)
            parts.append(
                data[["rule"]].assign(code=selected["weight"], shown=pair_shown(selected["value"]))
            )
        return parts[0], dict(zip(PERMUTED, parts[1:], strict=True))

    results = []
    for tokens in (kinds := ["corresponding", "same position"]):
        decoded = probes.decode(
            *codes(trained.model, tokens),
            samples=SAMPLES,
            types="shown",
            untrained=codes(trained.untrained, tokens),
            seed=trained.seed,
        )
        results.append(decoded.drop_vars("confusion").drop_dims(["true", "predicted"]))
    tokens_of = xr.Variable("tokens", kinds)
    scores = xr.concat(results, tokens_of, data_vars="all", combine_attrs="drop_conflicts")
    return cast(xr.Dataset, scores)


def alignment(trained: Trained, n: int = 2000) -> xr.Dataset | None:
    """Linear decoding of which token corresponds to an answer token, from the latter's attention.

    The features are the weights to all tokens of the row's panel in the first or second column.

    Args:
        trained: the trained model and its untrained control.
        n: instances for fitting, and for scoring on each split.
    """
    n_features = trained.setup.task.n_features
    if n_features == 1:
        return None
    fit, *tests = (list(trained.batches(split, n)) for split in ("id", *PERMUTED))

    def weights(model: Any, column: int) -> tuple[xr.Dataset, dict[str, xr.Dataset]]:
        all_data = (permuted_weights(model, batches, n_features) for batches in (fit, *tests))
        first, *others = (data.isel(column=column, drop=True) for data in all_data)
        return first, dict(zip(PERMUTED, others, strict=True))

    results = [
        probes.decode(
            *weights(trained.model, column),
            code="weight",
            label="corresponding",
            samples=SAMPLES,
            untrained=weights(trained.untrained, column),
            seed=trained.seed,
        )
        for column in range(2)
    ]
    columns = xr.Variable("column", ["first", "second"])
    return xr.concat(results, columns, data_vars="all", combine_attrs="drop_conflicts")


# Examples


def samples(trained: Trained, n: int = 3, n_codes: int = 32) -> xr.Dataset:
    """Instances of held-out combinations, with the attention of the last answer token.

    Also the cosine similarity of single codes, of the last feature, sorted by its rule.

    Args:
        trained: the trained model.
        n: number of instances.
        n_codes: number of codes that are compared, from the split without permuted columns.
    """
    n_features = trained.setup.task.n_features
    attention = {
        name: probes.Quantity(
            f"blocks.*.attn.{hook}",
            ("example", "head", "key_pos"),
            reduce=lambda weights: weights[:, :, -1],
            long_name=f"{about} of the last answer token",
        )
        for name, hook, about in (
            ("scores", "hook_attn_scores", "attention scores"),
            ("pattern", "hook_pattern", "attention weights"),
        )
    }
    answer = probes.Quantity(
        None, ("example", "token"), lambda logits: logits.argmax(-1), long_name="answer"
    )
    dims = {
        "rule": SAMPLES,
        "permutation": ("example", "column", "token"),
        "values": ("example", "row", "column", "feature"),
    }
    batches = list(trained.batches("ood", n))
    data = probes.capture(trained.model, batches, attention | {"answer": answer}, latent_dims=dims)
    kept = data[[*attention, "answer", *dims]]
    codes = codes_of(trained.model, trained.batches(HELD_OUT, n_codes), n_features)
    codes = codes.isel(feature=-1).sortby("rule").rename(example="sample")
    code = codes["code"].transpose("layer", "sample", ...).to_numpy()
    code = code.reshape(*code.shape[:2], -1)
    lengths = np.linalg.norm(code, axis=-1, keepdims=True)
    units = code / np.where(lengths > 0, lengths, np.nan)
    about = {"long_name": "cosine similarity of single codes"}
    kept = kept.assign(
        code_similarity=(("layer", "sample", "other"), units @ units.swapaxes(1, 2), about),
        code_rule=codes["rule"].drop_vars("feature", errors="ignore"),
    )
    return numbered(kept)
