"""How well routing follows operations: entropies, information and assignment, resampled."""

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
        use: the routing, rows sum to 1, and beside it the one-hot choice.
        operation: index of the operation.
        example: index of the example.
    """

    use: Float[Tensor, "token two module"]
    operation: Int[Tensor, " token"]
    example: Int[Tensor, " token"]

    def shuffled(self, generator: torch.Generator) -> "Routings":
        """The same routings with the operations dealt out anew."""
        order = torch.randperm(len(self.operation), generator=generator)
        return Routings(self.use, self.operation[order], self.example)

    def summed(self) -> list[tuple[int, Int[Tensor, " part"], Float[Tensor, "part cell"]]]:
        """By operation: the examples that have it, and their summed routing and choices."""
        found = []
        for operation in self.operation.unique().tolist():
            mine = self.operation == operation
            examples, place = self.example[mine].unique(return_inverse=True)
            sums = self.use.new_zeros(len(examples), self.use[0].numel())
            found.append(
                (operation, examples, sums.index_add_(0, place, self.use[mine].flatten(1)))
            )
        return found


@dataclass(frozen=True)
class LayerTables:
    """One layer's tables of the sample, and what is held fixed in its resamples.

    Attributes:
        routed: summed routing.
        chosen: how often a module is chosen.
        assignment: index of the module assigned to the operation, -1 for none.
        chance: the mutual information expected by chance.
    """

    routed: Float[Tensor, "operation module"]
    chosen: Int[Tensor, "operation module"]
    assignment: Int[Tensor, " operation"]
    chance: float


def score_layers(
    layers: Sequence[Routings], *, examples: int, operations: int, resamples: int, seed: int
) -> tuple[list[LayerTables], Interval]:
    """The tables of each layer, then of all together, and their SCORES [layer, score].

    With basic bootstrap intervals over examples, widened to hold the score.
    """
    modules = layers[0].use.shape[2]
    summed = [layer.summed() for layer in layers]

    def tables(weights: Float[Tensor, "draw example"]) -> list[Float[Tensor, "two draw ..."]]:
        """Sums of the routing and of the choices by operation, then those of all layers."""
        by_example = weights.T.contiguous()
        every = []
        for parts in summed:
            table = by_example.new_zeros(operations, 2 * modules, len(weights))
            for operation, mine, sums in parts:
                torch.mm(sums.T, by_example[mine], out=table[operation])
            every.append(table.view(operations, 2, modules, -1).permute(1, 3, 0, 2))
        return [*every, torch.stack(every).sum(dim=0)]

    sample = tables(torch.ones(1, examples, dtype=torch.double))
    known = [_describe(routed[0], chosen[0].round().long()) for routed, chosen in sample]

    def scores(found: list[Tensor], samples: int) -> Float[np.ndarray, "draw layer score"]:
        # Chance adds information once in drawing the sample, and as much again in each resample.
        return torch.stack(
            [
                _score(*table, chance=samples * layer.chance, assignment=layer.assignment)
                for table, layer in zip(found, known, strict=True)
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
    return known, Interval(estimate, np.minimum(estimate, low), np.maximum(estimate, high))


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
    """SCORES of each draw, given the mutual information expected by chance."""
    undefined = torch.tensor(torch.nan, dtype=routed.dtype)
    modules = routed.shape[2]
    total = routed.sum(dim=2, keepdim=True)
    seen = (total > 0).to(routed.dtype).sum(dim=1)[:, 0]
    # 0 / 0 is NaN: no score where nothing is seen.
    activation = torch.where(total > 0, routed / total, 0.0)
    apart = _entropy(activation).sum(dim=1) / seen
    together = _entropy(activation.sum(dim=1) / seen[:, None])
    most = np.log(modules) if modules > 1 else torch.nan
    attainable = torch.where(seen > 1, seen.clamp(max=modules).log(), undefined)

    joint = chosen / chosen.sum(dim=(1, 2), keepdim=True)
    of_operation, of_module = _entropy(joint.sum(dim=2)), _entropy(joint.sum(dim=1))
    information = (of_operation + of_module - _entropy(joint.flatten(1))).clamp(min=0)
    informed = (seen > 1) & (modules > 1)
    mean = torch.where(informed, (of_operation + of_module) / 2, undefined)
    # Nothing is above chance where chance explains all: each operation and module occurs once.
    above = torch.where(mean - chance > 1e-12, mean - chance, undefined)

    right = joint.gather(2, assignment.clamp(min=0).expand(len(joint), -1)[..., None])[..., 0]
    return torch.stack(
        [
            1 - apart / most,
            together / most,
            together / attainable,
            information / mean,
            (information - chance) / above,
            (right * (assignment >= 0)).sum(dim=1),
        ],
        dim=1,
    )


def _entropy(probabilities: Float[Tensor, "*rest outcome"]) -> Float[Tensor, "*rest"]:
    return -torch.xlogy(probabilities, probabilities).sum(dim=-1)


def _expected_information(counts: Int[Tensor, "operation module"]) -> float:
    """Mutual information expected of these margins by chance (Vinh et al. 2010), in nats."""
    # Imported here: scikit-learn takes a second, and a wrong argument should not wait for it.
    from scipy.sparse import csr_matrix
    from sklearn.metrics.cluster import expected_mutual_information

    used = counts[counts.sum(dim=1) > 0][:, counts.sum(dim=0) > 0].numpy()
    if not used.size:
        return 0.0
    return float(expected_mutual_information(csr_matrix(used), int(used.sum())))


def _assign(counts: Int[Tensor, "operation module"]) -> Int[Tensor, " operation"]:
    """The one-to-one assignment with the most choices, -1 where it has none."""
    from scipy.optimize import linear_sum_assignment

    assignment = torch.full((len(counts),), -1)
    operation, module = map(torch.from_numpy, linear_sum_assignment(counts.numpy(), maximize=True))
    assignment[operation] = torch.where(counts[operation, module] > 0, module, -1)
    return assignment
