"""Entropies, mutual information and assignment of routings and operations, with intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from probes.statistics.intervals import Interval, bootstrap

SCORES = {
    "specialization": "1 - mean entropy of an operation's modules / log M",
    "collapse": "entropy of the modules over all operations / log M",
    "collapse_attainable": "entropy of the modules over all operations / log min(|S|, M)",
    "normalised_mutual_information": "mutual information of operation and chosen module / mean of "
    "their entropies",
    "adjusted_mutual_information": "mutual information of operation and chosen module, adjusted "
    "for chance",
    "assignment_accuracy": "share that is routed to the module assigned to the operation",
}
_LOWEST = np.array([-1.0 if name == "adjusted_mutual_information" else 0.0 for name in SCORES])
_HIGHEST = np.array([np.inf if name == "collapse_attainable" else 1.0 for name in SCORES])


@dataclass(frozen=True)
class Routings:
    """The routings of one layer that have an operation.

    Attributes:
        use: the routing, whose rows sum to 1, and the one-hot choice.
        operation: index of the operation.
        example: index of the example.
    """

    use: Float[Tensor, "token two module"]
    operation: Int[Tensor, " token"]
    example: Int[Tensor, " token"]

    def shuffled(self, generator: torch.Generator) -> "Routings":
        """Permute the operations among the routings."""
        order = torch.randperm(len(self.operation), generator=generator)
        return Routings(self.use, self.operation[order], self.example)

    def summed(self) -> list[tuple[int, Int[Tensor, " part"], Float[Tensor, "part cell"]]]:
        """Sum routings and choices by operation and example."""
        sums_by_operation = []
        for operation in self.operation.unique().tolist():
            selected = self.operation == operation
            examples, index = self.example[selected].unique(return_inverse=True)
            sums = self.use.new_zeros(len(examples), self.use[0].numel())
            sums_by_operation.append(
                (operation, examples, sums.index_add_(0, index, self.use[selected].flatten(1)))
            )
        return sums_by_operation


@dataclass(frozen=True)
class LayerTables:
    """Tables of one layer for the sample, and quantities that are fixed in its resamples.

    Attributes:
        routed: summed routing.
        chosen: number of choices of each module.
        assignment: index of the module assigned to the operation, -1 for none.
        chance: mutual information expected by chance.
    """

    routed: Float[Tensor, "operation module"]
    chosen: Int[Tensor, "operation module"]
    assignment: Int[Tensor, " operation"]
    chance: float


def score_layers(
    layers: Sequence[Routings], *, examples: int, operations: int, resamples: int, seed: int
) -> tuple[list[LayerTables], Interval]:
    """Compute the tables and SCORES [layer, score] of each layer, then of all layers together.

    Intervals are basic bootstrap intervals over examples, widened to contain the score.
    """
    modules = layers[0].use.shape[2]
    summed = [layer.summed() for layer in layers]

    def tables(weights: Float[Tensor, "draw example"]) -> list[Float[Tensor, "two draw ..."]]:
        """Sum routing and choices by operation for each layer, then for all layers together."""
        by_example = weights.T.contiguous()
        of_layers = []
        for parts in summed:
            table = by_example.new_zeros(operations, 2 * modules, len(weights))
            for operation, examples_of_operation, sums in parts:
                torch.mm(sums.T, by_example[examples_of_operation], out=table[operation])
            of_layers.append(table.view(operations, 2, modules, -1).permute(1, 3, 0, 2))
        return [*of_layers, torch.stack(of_layers).sum(dim=0)]

    sample = tables(torch.ones(1, examples, dtype=torch.double))
    described = [_describe(routed[0], chosen[0].round().long()) for routed, chosen in sample]

    def scores(layer_tables: list[Tensor], samples: int) -> Float[np.ndarray, "draw layer score"]:
        # Chance adds information once in the sample, and as much again in each resample.
        return torch.stack(
            [
                _score(*table, chance=samples * layer.chance, assignment=layer.assignment)
                for table, layer in zip(layer_tables, described, strict=True)
            ],
            dim=1,
        ).numpy()

    estimate, low, high = bootstrap(
        lambda weights: scores(tables(torch.from_numpy(weights)), 2),
        (examples,),
        estimate=scores(sample, 1)[0],
        method="basic",
        resamples=resamples,
        seed=seed,
    )
    low, high = (end.clip(_LOWEST, _HIGHEST) for end in (low, high))
    return described, Interval(estimate, np.minimum(estimate, low), np.maximum(estimate, high))


def _describe(
    routed: Float[Tensor, "operation module"], counts: Int[Tensor, "operation module"]
) -> LayerTables:
    return LayerTables(routed, counts, _assign(counts), _expected_information(counts))


def _score(
    routed: Float[Tensor, "draw operation module"],
    chosen: Float[Tensor, "draw operation module"],
    *,
    chance: float,
    assignment: Int[Tensor, " operation"],
) -> Float[Tensor, "draw score"]:
    """Compute SCORES of each draw, given the mutual information expected by chance."""
    undefined = torch.tensor(torch.nan, dtype=routed.dtype)
    modules = routed.shape[2]
    total = routed.sum(dim=2, keepdim=True)
    n_seen = (total > 0).to(routed.dtype).sum(dim=1)[:, 0]
    # 0 / 0 is NaN: no score where no operation occurs.
    activation = torch.where(total > 0, routed / total, 0.0)
    entropy_within = _entropy(activation).sum(dim=1) / n_seen
    entropy_overall = _entropy(activation.sum(dim=1) / n_seen[:, None])
    highest = np.log(modules) if modules > 1 else torch.nan
    attainable = torch.where(n_seen > 1, n_seen.clamp(max=modules).log(), undefined)

    joint = chosen / chosen.sum(dim=(1, 2), keepdim=True)
    of_operation, of_module = _entropy(joint.sum(dim=2)), _entropy(joint.sum(dim=1))
    information = (of_operation + of_module - _entropy(joint.flatten(1))).clamp(min=0)
    defined = (n_seen > 1) & (modules > 1)
    mean = torch.where(defined, (of_operation + of_module) / 2, undefined)
    # Undefined where chance explains all: each operation and module occurs once.
    gain = torch.where(mean - chance > 1e-12, mean - chance, undefined)

    assigned = joint.gather(2, assignment.clamp(min=0).expand(len(joint), -1)[..., None])[..., 0]
    return torch.stack(
        [
            1 - entropy_within / highest,
            entropy_overall / highest,
            entropy_overall / attainable,
            information / mean,
            (information - chance) / gain,
            (assigned * (assignment >= 0)).sum(dim=1),
        ],
        dim=1,
    )


def _entropy(probabilities: Float[Tensor, "*rest outcome"]) -> Float[Tensor, "*rest"]:
    return -torch.xlogy(probabilities, probabilities).sum(dim=-1)


def _expected_information(counts: Int[Tensor, "operation module"]) -> float:
    """Compute the mutual information expected by chance (Vinh et al. 2010), in nats."""
    # Imported here because scikit-learn takes a second to import.
    from scipy.sparse import csr_matrix
    from sklearn.metrics.cluster import expected_mutual_information

    nonempty = counts[counts.sum(dim=1) > 0][:, counts.sum(dim=0) > 0].numpy()
    if not nonempty.size:
        return 0.0
    return float(expected_mutual_information(csr_matrix(nonempty), int(nonempty.sum())))


def _assign(counts: Int[Tensor, "operation module"]) -> Int[Tensor, " operation"]:
    """Find the one-to-one assignment with the most choices, -1 where it has none."""
    from scipy.optimize import linear_sum_assignment

    assignment = torch.full((len(counts),), -1)
    operation, module = map(torch.from_numpy, linear_sum_assignment(counts.numpy(), maximize=True))
    assignment[operation] = torch.where(counts[operation, module] > 0, module, -1)
    return assignment
