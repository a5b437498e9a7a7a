"""What interventions on a Raven model need: where the last row stands, what other rules answer.

Both are about the splits whose columns all list the features in one order (`id_unpermuted`,
`ood_unpermuted`): there token k of every panel is feature k.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tasks.batch import Batch
from tasks.raven.task import Raven


class RavenPairs(NamedTuple):
    """Pairs of instances, a base and a source, with one feature that each pair is about.

    Attributes:
        base, source: inputs [pair, 9 K, F], see `Raven.batch`.
        query: [pair] int64, the token at which the feature of the last panel is read out.
        keys: [pair, 2] int64, the tokens of the same feature in the row's other panels.
        answers: [pair, K] int64 each, -1 for all features but that of the pair: `source_rule`,
            what the source's rule gives on the base's panels (-1 where it gives nothing), and
            `base_rule`, the base's own answer.
    """

    base: Tensor
    source: Tensor
    query: Tensor
    keys: Tensor
    answers: dict[str, Tensor]


def raven_pairs(task: Raven, base: Batch, source: Batch, n: int) -> dict[str, RavenPairs]:
    """Return what base instances would answer, did a feature follow the rule of a source instance.

    Instance i of both batches is a pair, which is about feature i modulo K.

    Args:
        task: what the batches are of.
        base: a batch of a split that is not permuted.
        source: as many instances, of such a split too.
        n: pairs of each condition, at most.

    Returns:
        The first pairs of two conditions: `other_rule`, the rules at the feature differ, and what
        they answer is defined and differs; and `same_rule`.

    Raises:
        ValueError: the batches differ in size, or list features in several orders.

    Example:
        base, source = (task.batch("id_unpermuted", index, 1000) for index in (0, 1))
        raven_pairs(task, base, source, 50)["other_rule"].answers["source_rule"]
    """
    if len(base) != len(source):
        raise ValueError(f"source has {len(source)} instances: allowed is {len(base)}, as base has")
    for name, batch in (("base", base), ("source", source)):
        orders = batch.latents["permutation"]
        if (orders != torch.arange(orders.shape[-1], device=orders.device)).any():
            raise ValueError(
                f"{name} has columns of several orders: allowed is an unpermuted split"
            )
    pair = torch.arange(len(base), device=base.targets.device)
    feature = pair % task.config.n_features
    base_rule, source_rule = (one.latents["rule"][pair, feature] for one in (base, source))
    own = base.targets[pair, feature]
    by_rule, defined = task.answers_by_rule(base.latents["values"])
    given = by_rule[pair, feature, source_rule]
    differs = defined[pair, feature, source_rule] & (given != own)
    conditions = {
        "other_rule": (base_rule != source_rule) & differs,
        "same_rule": base_rule == source_rule,
    }
    query, keys = (where.to(pair.device) for where in raven_last_row(task.config.n_features))
    left_open = torch.full_like(base.targets, -1)
    pairs = {}
    for condition, belongs in conditions.items():
        chosen = belongs.nonzero()[:n, 0]
        asked = feature[chosen]
        pairs[condition] = RavenPairs(
            base=base.inputs[chosen],
            source=source.inputs[chosen],
            query=query[asked],
            keys=keys[asked],
            answers={
                name: left_open[chosen].scatter(1, asked[:, None], answer[chosen, None])
                for name, answer in (("source_rule", given), ("base_rule", own))
            },
        )
    return pairs


def raven_last_row(n_features: int) -> tuple[Tensor, Tensor]:
    """Return where the last row's features stand in a sequence of 9 K tokens.

    Args:
        n_features: K.

    Returns:
        query [K] int64: the tokens at which the last panel is read out;
        keys [K, 2] int64: the same feature in the row's first and second panel.

    Example:
        `raven_last_row(2)` is `[16, 17]` and `[[12, 14], [13, 15]]`.
    """
    panels = torch.arange(6, 9) * n_features + torch.arange(n_features)[:, None]
    return panels[:, 2], panels[:, :2]
