"""For probes of Raven models: positions of the last row, correspondences, answers of other rules.

`raven_last_row` and `raven_pairs` assume the splits whose columns list the features in the same
order (`id_unpermuted`, `ood_unpermuted`), where token k of every panel is feature k.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from tasks.batch import Batch
from tasks.raven.task import Raven


class RavenPairs(NamedTuple):
    """Pairs of instances, a base and a source, each with one feature to intervene on.

    Attributes:
        base, source: inputs [pair, 9 K, F], see `Raven.batch`.
        query: [pair] int64, the position at which the feature of the last panel is read out.
        keys: [pair, 2] int64, the positions of the same feature in the row's other panels.
        answers: [pair, K] int64 each, -1 for all features but that of the pair: `source_rule`,
            the answer of the source's rule on the base's panels (-1 where undefined), and
            `base_rule`, the base's own answer.

    Example:
        >>> base, source = (task.batch("id_unpermuted", index, 200) for index in (0, 1))
        >>> pairs = raven_pairs(task, base, source, 10)["other_rule"]
        >>> pairs.base.shape, pairs.query.shape, pairs.keys.shape
        (torch.Size([10, 18, 8]), torch.Size([10]), torch.Size([10, 2]))
    """

    base: Tensor
    source: Tensor
    query: Tensor
    keys: Tensor
    answers: dict[str, Tensor]


def raven_pairs(task: Raven, base: Batch, source: Batch, n: int) -> dict[str, RavenPairs]:
    """Return pairs of instances with the base's answer under the rule of the source.

    Instances i of both batches are a pair, with feature i modulo K.

    Args:
        task: the task of the batches.
        base: a batch of an unpermuted split.
        source: a batch of an unpermuted split, of the same size.
        n: the most pairs of each condition.

    Returns:
        The first pairs of two conditions: `other_rule`, where the rules of the feature differ and
        their answers are defined and differ; and `same_rule`.

    Raises:
        ValueError: the batches differ in size, or are of a permuted split.

    Example:
        >>> base, source = (task.batch("id_unpermuted", index, 1000) for index in (0, 1))
        >>> raven_pairs(task, base, source, 50)["other_rule"].answers["source_rule"]
    """
    if len(base) != len(source):
        raise ValueError(
            f"source must have as many instances as base, {len(base)}, got {len(source)}"
        )
    for name, batch in (("base", base), ("source", source)):
        orders = batch.latents["permutation"]
        if (orders != torch.arange(orders.shape[-1], device=orders.device)).any():
            raise ValueError(
                f"{name} must be of an unpermuted split, got columns with different orders"
            )
    pair = torch.arange(len(base), device=base.targets.device)
    feature = pair % task.config.n_features
    base_rule, source_rule = (batch.latents["rule"][pair, feature] for batch in (base, source))
    base_answer = base.targets[pair, feature]
    wanted = task.counterfactual(base, {"rule": source.latents["rule"]})
    source_answer = wanted.targets[pair, feature]
    differs = wanted.mask[pair, feature] & (source_answer != base_answer)
    conditions = {
        "other_rule": (base_rule != source_rule) & differs,
        "same_rule": base_rule == source_rule,
    }
    query, keys = (tokens.to(pair.device) for tokens in raven_last_row(task.config.n_features))
    answers = {"source_rule": source_answer, "base_rule": base_answer}
    no_answer = torch.full_like(base.targets, -1)
    pairs = {}
    for condition, is_member in conditions.items():
        selected = is_member.nonzero()[:n, 0]
        features = feature[selected]
        pairs[condition] = RavenPairs(
            base=base.inputs[selected],
            source=source.inputs[selected],
            query=query[features],
            keys=keys[features],
            answers={
                name: no_answer[selected].scatter(1, features[:, None], answer[selected, None])
                for name, answer in answers.items()
            },
        )
    return pairs


def raven_last_row(n_features: int) -> tuple[Tensor, Tensor]:
    """Return the positions of the last row's features in a sequence of 9 K tokens.

    Args:
        n_features: K.

    Returns:
        query [K] int64: the positions at which the last panel is read out;
        keys [K, 2] int64: the same feature in the row's first and second panel.

    Example:
        >>> query, keys = raven_last_row(2)
        >>> query.tolist(), keys.tolist()
        ([16, 17], [[12, 14], [13, 15]])
    """
    panels = torch.arange(6, 9) * n_features + torch.arange(n_features)[:, None]
    return panels[:, 2], panels[:, :2]


def raven_correspondence(
    permutation: Int[Tensor, "batch column feature"],
) -> Int[Tensor, "batch feature column"]:
    """Return where the feature of each answer token is in the panels of each column.

    Args:
        permutation: [batch, 3, K], of a batch: token m of a panel in column c is the feature
            permutation[c, m].

    Returns:
        [batch, K, 3]: for token m of the last panel the number of the token with the same feature
        in a panel of column c; for the last column m itself.

    Example:
        >>> raven_correspondence(batch.latents["permutation"])[:, 0, 1]
    """
    where = permutation.argsort(-1)
    asked = permutation[:, None, -1].expand_as(permutation)
    return where.gather(-1, asked).transpose(1, 2)
