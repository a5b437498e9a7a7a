"""Symbolic Raven matrices (SRAVEN): Schug et al. 2024, "Attention as a Hypernetwork", SRAVEN.

A 3x3 grid of panels, each with K features in [0, F). Along the rows, every feature follows one of
eight rules. Each column of panels may list the features in a different order, so the model must
also infer which features correspond. The last panel is to be predicted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations_with_replacement, permutations
from math import comb, factorial
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tasks.batch import Batch
from tasks.causal import Allowed, CausalTask, Entries, Variable, integers
from tasks.common import (
    Key,
    require_bool,
    require_choice,
    require_held_out,
    require_int,
    require_number,
    require_shape,
)
from tasks.raven.rules import DISTRIBUTE, RAVEN_RULES, all_rows, rule_answers

_MAX_FEATURES = 8  # there is a table of all K! orders
_MAX_VALUES = 64  # and one of all F^3 triples
_SPLIT_TRIES = 10_000
_AHEAD = 32  # batches that are made at once on a CUDA device


@dataclass(frozen=True)
class RavenConfig:
    """Settings of symbolic Raven matrices.

    Attributes:
        n_features: K, features per panel, 1 to 8.
        n_values: F, values of a feature, 3 to 64.
        ood_fraction: share of the C(K+7, K) rule combinations that is held out, rounded to a
            number of combinations; neither side may be empty.
        seed: seeds the split and every batch, 0 to 2^32 - 1.
        cover_rules: whether every rule must occur on both sides of the split.
        rule_order: the order in which the features get the rules of a combination: "random", or
            "sorted" by rule id as in the authors' data. If sorted, a feature's index is informative
            about its rule: with K=4, the last feature follows "distribute three" in 36% of the
            combinations.

    Raises:
        ValueError: an argument is out of its range, or no split can cover the rules.

    Example:
        >>> RavenConfig(n_features=2).n_values
        8
    """

    n_features: int = 4
    n_values: int = 8
    ood_fraction: float = 0.25
    seed: int = 0
    cover_rules: bool = True
    rule_order: Literal["random", "sorted"] = "random"

    def __post_init__(self) -> None:
        require_int("n_features", self.n_features, 1, _MAX_FEATURES)
        require_int("n_values", self.n_values, 3, _MAX_VALUES)
        require_int("seed", self.seed, 0, 2**32 - 1)
        require_bool("cover_rules", self.cover_rules)
        require_choice("rule_order", self.rule_order, ("random", "sorted"))
        require_number("ood_fraction", self.ood_fraction, 0, 1)
        require_held_out(
            "ood_fraction", self.ood_fraction, self.n_ood, self.n_combinations, "combinations"
        )
        smaller_side = min(self.n_ood, self.n_combinations - self.n_ood)
        if self.cover_rules and smaller_side * self.n_features < len(RAVEN_RULES):
            raise ValueError(self._cannot_cover(f"{smaller_side} combinations are too few"))

    @property
    def n_combinations(self) -> int:
        """Number of rule combinations (multisets of K rules): C(K+7, K)."""
        return comb(self.n_features + len(RAVEN_RULES) - 1, self.n_features)

    @property
    def n_ood(self) -> int:
        """Number of rule combinations that are held out."""
        return round(self.ood_fraction * self.n_combinations)

    def _cannot_cover(self, why: str) -> str:
        return (
            f"cover_rules must be False with n_features={self.n_features} and "
            f"ood_fraction={self.ood_fraction}, got True: not all {len(RAVEN_RULES)} rules can "
            f"occur on both sides of the split ({why}); or use more features, or a fraction nearer "
            f"to 0.5"
        )


class Raven(CausalTask):
    """Symbolic Raven matrices.

    Splits: `train` and `id` draw from the same rule combinations, `ood` from the held-out ones;
    `id_unpermuted` and `ood_unpermuted` list the features in the same order in all columns.

    Causal model: `rule`, `permutation` and `values` can be set; exogenous values are the first two
    of each row and the first row's set of "distribute three". From these and the rule follows the
    last value of each row, as in `rule_answers`, also of rows whose first two values belong to
    another progression. Where it is undefined it is -1 and has no token; the mask of an undefined
    answer is False.

    Example:
        >>> Raven(RavenConfig(n_features=2)).batch("ood", 0, 100)
    """

    SPLITS: ClassVar = ("train", "id", "ood", "id_unpermuted", "ood_unpermuted")

    def __init__(self, config: RavenConfig) -> None:
        self.config = config
        multisets = combinations_with_replacement(range(len(RAVEN_RULES)), config.n_features)
        self._all_combinations = torch.tensor(list(multisets))
        self._sides = _choose_sides(config, self._all_combinations)
        self._key = Key(config)
        self._tables: dict[torch.device, _Tables] = {}
        self._made: dict[tuple[str, int, torch.device], tuple[int, Batch]] = {}

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return self.SPLITS

    @property
    def chance(self) -> float:
        """Accuracy of guessing all K values: F^-K."""
        return float(self.config.n_values) ** -self.config.n_features

    def combinations(self, split: str) -> Tensor:
        """Return the rule combinations of a split, [n, K] int64, each sorted, in sorted order.

        Raises:
            ValueError: `split` is unknown.
        """
        return self._all_combinations[self._sides[self.side(split)]]

    def side(self, split: str) -> Literal["train", "ood"]:
        """Return the side of the split, `train` or `ood`, whose combinations a split draws from.

        Raises:
            ValueError: `split` is unknown.
        """
        self._require_split(split)
        return "ood" if split.startswith("ood") else "train"

    def is_permuted(self, split: str) -> bool:
        """Return whether the columns of a split list the features in different orders.

        Raises:
            ValueError: `split` is unknown.
        """
        self._require_split(split)
        return not split.endswith("_unpermuted")

    def batch(self, split: str, index: int, size: int, device: str | torch.device = "cpu") -> Batch:
        """Return batch `index` of a split, a pure function of the config and the arguments.

        On a CUDA device the batch is drawn there, from another random stream: it differs from the
        CPU's batch of that index. All other devices get the CPU's batch.

        Args:
            split: one of `splits`.
            index: 0 to 2^62.
            size: number of examples, 1 to 2^31; a smaller batch is in general not a part of a
                larger one.
            device: the device of the batch.

        Returns:
            A batch with
            inputs [batch, 9 K, F] float32, one-hot, panels in reading order, K tokens each, the
            last panel's K tokens zero;
            targets [batch, K] int64, the last panel, to be read out at the last K positions;
            mask [batch, K], all True;
            latents (int64):
            `rule` [batch, K]: the rule of each feature;
            `combination` [batch]: the index of the sorted rules among all combinations;
            `permutation` [batch, 3 (column), K]: token m of a panel in column c is the feature
            permutation[c, m];
            `response_rule` [batch, K]: the rule of token m of the last panel,
            rule[permutation[2, m]];
            `values` [batch, 3 (row), 3 (column), K]: the complete grid before the permutation.

        Raises:
            ValueError: `split` is unknown, or `index` or `size` is out of range.
        """
        self._require_split(split)
        require_int("index", index, 0, 2**62)
        require_int("size", size, 1, 2**31)
        device = torch.device(device)
        if device.type == "cuda":
            return self._batch_on_cuda(split, index, size, device)
        batch = self._make(split, self._draw_cpu(split, index, size))
        return batch if device.type == "cpu" else batch.to(device)

    def score(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the accuracy of the most probable values.

        Args:
            logits: [batch, K, F], for the tokens of the last panel.
            batch: the batch that was answered.

        Returns:
            `accuracy` [batch]: 1 where all K values are correct, else 0;
            `feature_accuracy` [batch]: the share of the K values that is correct.

        Raises:
            ValueError: `logits` has another shape.
        """
        require_shape("logits", logits, (*batch.targets.shape, self.config.n_values))
        right = logits.argmax(-1) == batch.targets
        return {"accuracy": right.all(-1).float(), "feature_accuracy": right.float().mean(-1)}

    def answers_by_rule(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return each rule's value of the last panel, whether or not it fits the other panels.

        Args:
            values: [batch, 3 (row), 3 (column), K], unpermuted; the last panel is not read.

        Returns:
            See `rule_answers`: both [batch, K, 8].
        """
        last = values[:, 2]
        first_row = values[:, 0].transpose(1, 2)
        return rule_answers(first_row, last[:, 0], last[:, 1], self.config.n_values)

    @property
    def _variables(self) -> dict[str, Variable]:
        n_features, last = self.config.n_features, self.config.n_values - 1
        orders = Allowed(f"orders of the features 0 to {n_features - 1}", _is_order)
        return {
            "rule": Variable(allowed=integers(0, len(RAVEN_RULES) - 1)),
            "permutation": Variable(allowed=orders),
            "combination": Variable(causes=("rule",), compute=self._combination),
            "response_rule": Variable(causes=("rule", "permutation"), compute=_of_tokens),
            "values": Variable(
                causes=("rule",),
                compute=self._last_values,
                allowed=integers(0, last),
                within=True,
                exogenous=True,
            ),
            "inputs": Variable(causes=("values", "permutation"), compute=self._show),
            "targets": Variable(causes=("values", "permutation"), compute=_answers),
            "mask": Variable(causes=("targets",), compute=lambda targets: targets >= 0),
        }

    def _require_split(self, split: str) -> None:
        require_choice("split", split, self.SPLITS)

    def _n_draws(self) -> int:
        return 5 + 4 * self.config.n_features

    def _draw_cpu(self, split: str, index: int, size: int) -> Tensor:
        generator = self._key.generator(f"/{split}/{index}")
        return torch.from_numpy(generator.random((size, self._n_draws())))

    def _batch_on_cuda(self, split: str, index: int, size: int, device: torch.device) -> Batch:
        """A batch that is drawn on the device.

        Where the one before it was asked for, too, as in training, several are made in advance,
        since starting a kernel takes longer than running it.
        """
        first, made = self._made.get((split, size, device), (0, None))
        n_made = 0 if made is None else len(made) // size
        if made is None or not first <= index < first + n_made:
            n = _AHEAD if n_made and index == first + n_made else 1
            draws = [self._draw_cuda(split, index + i, size, device) for i in range(n)]
            first, made = index, self._make(split, torch.cat(draws))
            self._made[split, size, device] = first, made
        start = (index - first) * size
        return made[start : start + size]

    def _draw_cuda(self, split: str, index: int, size: int, device: torch.device) -> Tensor:
        seed = self._key.seed(f"/{split}/{index}") % 2**63
        generator = torch.Generator(device).manual_seed(seed)
        shape = (size, self._n_draws())
        return torch.rand(shape, dtype=torch.float64, device=device, generator=generator)

    def _make(self, split: str, draws: Tensor) -> Batch:
        """Compute a batch from uniform draws in [0, 1), [batch, 5 + 4 K].

        The first five determine the combination, the order of its rules and three column orders;
        the others, for each feature, the triple of "distribute three" and the three rows.
        """
        n_features, n_values = self.config.n_features, self.config.n_values
        size, device = draws.shape[0], draws.device
        tables = self._tables_on(device)
        side = self.side(split)

        head = (draws[:, :5] * tables.head_ranges[split]).long()
        combination = tables.combination_ids[side].index_select(0, head[:, 0])
        orders = tables.orders[head[:, 1:]]
        permutation = orders[:, 1:]
        rule = tables.combinations[combination].gather(1, orders[:, 0])

        body = draws[:, 5:].view(size, n_features, 4) * tables.ranges[rule]
        body = body.long()
        row = body[..., 1:] + (tables.row_start[rule] + 6 * body[..., 0])[..., None]
        # [batch, feature, row, column] -> [batch, row, column, feature]
        values = tables.rows[row].permute(0, 2, 3, 1).contiguous()
        permuted = values.gather(3, permutation[:, None].expand(-1, 3, -1, -1))

        inputs = tables.one_hot.index_select(0, permuted.view(-1)).view(size, -1, n_values)
        inputs[:, -n_features:] = 0
        targets = permuted[:, 2, 2].clone()
        return Batch(
            inputs=inputs,
            targets=targets,
            mask=torch.ones_like(targets, dtype=torch.bool),
            latents={
                "rule": rule,
                "combination": combination,
                "permutation": permutation,
                "response_rule": _of_tokens(rule, permutation),
                "values": values,
            },
        )

    def _combination(self, rule: Int[Tensor, "batch feature"]) -> Int[Tensor, " batch"]:
        """Return the number of the combination of rules; combinations are in sorted order."""
        digits = len(RAVEN_RULES) ** torch.arange(self.config.n_features).flip(0)
        codes = (self._all_combinations * digits).sum(1)
        return torch.searchsorted(codes, (rule.sort(1).values * digits).sum(1))

    def _last_values(
        self, rule: Int[Tensor, "batch feature"], entries: Entries
    ) -> Int[Tensor, "batch 3 3 feature"]:
        """Return the grids with the last value of each row by its rule, -1 where undefined."""
        a, b, _ = entries.values.unbind(2)  # each [batch, row, feature]
        first_row = entries.values[:, :1].transpose(2, 3)
        answers, _ = rule_answers(first_row, a, b, self.config.n_values)
        answer = answers.gather(3, rule[:, None, :, None].expand(-1, 3, -1, 1))[..., 0]
        return torch.stack([a, b, answer], 2)

    def _show(
        self,
        values: Int[Tensor, "batch 3 3 feature"],
        permutation: Int[Tensor, "batch 3 feature"],
    ) -> Float[Tensor, "batch pos value"]:
        permuted = values.gather(3, permutation[:, None].expand(-1, 3, -1, -1)).flatten(1)
        inputs = (permuted[..., None] == torch.arange(self.config.n_values)).float()
        inputs[:, -self.config.n_features :] = 0
        return inputs

    def _tables_on(self, device: torch.device) -> "_Tables":
        if device not in self._tables:
            self._tables[device] = self._build_tables(device)
        return self._tables[device]

    def _build_tables(self, device: torch.device) -> "_Tables":
        n_features, n_values = self.config.n_features, self.config.n_values
        n_orders = factorial(n_features)
        n_rule_orders = n_orders if self.config.rule_order == "random" else 1
        n_triples = n_values * (n_values - 1) * (n_values - 2)
        head_ranges = {}
        for split in self.SPLITS:
            # The first order is the identity.
            n_columns = n_orders if self.is_permuted(split) else 1
            n_side = len(self._sides[self.side(split)])
            ranges = [n_side, n_rule_orders, n_columns, n_columns, n_columns]
            head_ranges[split] = torch.tensor(ranges, dtype=torch.float64, device=device)
        pair_ranges = [1, n_values**2, n_values**2, n_values**2]
        return _Tables(
            head_ranges=head_ranges,
            combination_ids={name: ids.to(device) for name, ids in self._sides.items()},
            combinations=self._all_combinations.to(device),
            orders=_tensor(permutations(range(n_features)), device),
            ranges=torch.tensor(
                [pair_ranges] * DISTRIBUTE + [[n_triples, 6, 6, 6]],
                dtype=torch.float64,
                device=device,
            ),
            row_start=torch.arange(len(RAVEN_RULES), device=device) * n_values**2,
            rows=all_rows(n_values).to(device),
            one_hot=torch.eye(n_values, device=device),
        )


def _of_tokens(
    of_features: Int[Tensor, "batch feature"], permutation: Int[Tensor, "batch 3 feature"]
) -> Int[Tensor, "batch token"]:
    """Return what belongs to each token of the last panel, given what belongs to each feature."""
    return of_features.gather(1, permutation[:, 2])


def _answers(
    values: Int[Tensor, "batch 3 3 feature"], permutation: Int[Tensor, "batch 3 feature"]
) -> Int[Tensor, "batch token"]:
    return _of_tokens(values[:, 2, 2], permutation)


def _is_order(new: Tensor, _: Tensor) -> Bool[Tensor, "batch 3 1"]:
    return (new.sort(-1).values == torch.arange(new.shape[-1])).all(-1, keepdim=True)


class _Tables(NamedTuple):
    """Lookup tables that turn uniform draws into a batch, on one device."""

    head_ranges: dict[str, Tensor]  # per split, [5]
    combination_ids: dict[str, Tensor]  # per side, [n]
    combinations: Tensor  # [n_combinations, K]
    orders: Tensor  # [K!, K]
    ranges: Tensor  # [8, 4], for each rule: number of triples, number of choices of each row
    row_start: Tensor  # [8], the first row of each rule in `rows`
    rows: Tensor  # [n_rows, 3]
    one_hot: Tensor  # [F, F]


def _choose_sides(config: RavenConfig, combinations: Tensor) -> dict[str, Tensor]:
    """Return the sorted ids of the combinations of each side of the split."""
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(_SPLIT_TRIES):
        order = torch.randperm(len(combinations), generator=generator)
        sides = {"train": order[config.n_ood :], "ood": order[: config.n_ood]}
        if not config.cover_rules or all(
            len(combinations[ids].unique()) == len(RAVEN_RULES) for ids in sides.values()
        ):
            return {name: ids.sort().values for name, ids in sides.items()}
    raise ValueError(config._cannot_cover(f"none of {_SPLIT_TRIES:,} random splits does so"))


def _tensor(rows: Iterable[tuple[int, ...]], device: torch.device) -> Tensor:
    return torch.tensor(list(rows), device=device)
