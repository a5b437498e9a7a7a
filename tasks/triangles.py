"""Detection of equilateral triangles: Mittal et al. 2021, "Compositional Attention", after Ahmad &
Omohundro 1990, "Equilateral Triangles: A Challenge for Connectionist Vision".

An image shows three clusters of points. Do the clusters' midpoints form an equilateral triangle? No
distance determines the answer alone; each must be compared with the others.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from tasks.answers import is_correct
from tasks.batch import Batch
from tasks.causal import Allowed, CausalTask, Variable, integers, numbers
from tasks.common import Key, require_choice, require_int, require_shape
from tasks.finite import ExampleSet, balanced_order, small
from tasks.finite_task import FiniteTask

_REACH = 2  # a cluster lies in a square of 5 x 5 pixels around its corner
_POINTS = 8
_SHORTEST = 12  # pixels: points of different clusters are farther apart than those of the same one
_UNCLEAR = 1.0  # pixels: deviations from equilateral triangles that are too small are excluded
_ROUNDED = 0.5**0.5 + 1e-9  # the largest deviation of corners that are rounded to pixels
_APEX = np.exp(1j * np.pi / 3)  # rotates by 60 degrees
_CHUNK = 2**15  # triangles drawn at a time, whatever the size of the split

# One of every two opposite offsets within reach.
_OFFSETS = np.array([at for at in product(range(-_REACH, _REACH + 1), repeat=2) if at > (0, 0)])


@dataclass(frozen=True, kw_only=True)
class TrianglesConfig:
    """Settings of the triangles. The default sizes of `train` and `test` are the published ones.

    Attributes:
        n_train, n_valid, n_test: images of each split, 2 to 100,000.
        image_size: height and width, 48 to 256 pixels.
        seed: seeds the triangles, their points and their order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> batch = Triangles(TrianglesConfig(n_train=10, n_valid=2, n_test=4)).batch("test", 0, 4)
        >>> batch.inputs.shape, batch.targets.sum()  # half of them are equilateral
        (torch.Size([4, 1, 64, 64]), tensor(2))
    """

    n_train: int = 50_000
    n_valid: int = 10_000
    n_test: int = 10_000
    image_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n_train", "n_valid", "n_test"):
            require_int(name, getattr(self, name), 2, 100_000)
        # 48 pixels allow 650,840 equilateral triangles; at most 150,000 are needed.
        require_int("image_size", self.image_size, 48, 256)
        require_int("seed", self.seed, 0, 2**32 - 1)

    def size(self, split: str) -> int:
        """Return the number of images of a split.

        Raises:
            ValueError: `split` is unknown.
        """
        sizes = {"train": self.n_train, "valid": self.n_valid, "test": self.n_test}
        require_choice("split", split, tuple(sizes))
        return sizes[split]


class Triangles(FiniteTask, CausalTask):
    """Equilateral triangles.

    A corner is a pixel; its cluster is four pairs of points that lie opposite to each other around
    it, so the corner is exactly the cluster's midpoint. Clusters lie within the image, and sides
    are at least 12 pixels long.

    Two corners of an equilateral triangle are random; the third is the second one rotated about the
    first by 60 degrees and rounded, by at most 0.71 pixels. All three corners of the other
    triangles are random, but each is more than one pixel away from the position that would make the
    triangle equilateral, and the longest side exceeds the shortest one by more than one pixel.

    Random triangles are larger than equilateral ones: in images of 64 x 64 pixels, a threshold on
    the longest side alone classifies 76% correctly.

    Splits: `train`, `valid` and `test`; no triangle occurs twice, within or across splits. Half of
    each split is equilateral, and so is half of every prefix of `valid` and `test`. The test set
    does not depend on the sizes of the other splits.

    A batch has inputs [batch, 1, height, width] float32: 1 at the points, else 0;
    targets [batch, 1] int64: 1 if equilateral, else 0; mask [batch, 1], all True; and the latents
    `equilateral` [batch] bool;
    `corners` [batch, corner, 2] int64: (x, y), columns from the left and rows from the top;
    `offsets` [batch, corner, point, 2] int64: the points' positions from their corner;
    `points` [batch, corner, point, 2] int64: the points of the clusters;
    `side` [batch, 3] float32: the distances from the first corner to the second, from the second to
    the third, and from the third to the first;
    `defect` [batch] float32: the distance of each corner from the position that would make the
    triangle equilateral, the same for all three.

    Causal model: `corners` and `offsets` can be set and, leaving the image, `defect` and
    `equilateral`, which is True up to a defect of one pixel. The mask is False for triangles that
    the sampler excludes, as unclear or too small, whatever is set besides the corners.

    Example:
        >>> Triangles(TrianglesConfig()).batch("test", 0, 100)
    """

    SPLITS: ClassVar = ("train", "valid", "test")

    def __init__(self, config: TrianglesConfig) -> None:
        # The first triangles do not depend on the sizes of the splits.
        super().__init__(key=Key(replace(config, n_train=2, n_valid=2, n_test=2)))
        self.config = config

    @property
    def chance(self) -> float:
        """Accuracy of guessing: a half."""
        return 1 / 2

    def groups(self, batch: Batch) -> dict[str, Bool[Tensor, " batch"]]:
        """Return the masks of the `equilateral` and of the `other` triangles."""
        equilateral = batch.latents["equilateral"]
        return {"equilateral": equilateral, "other": ~equilateral}

    def score(
        self, output: Float[Tensor, "batch 2"], batch: Batch
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return `correct` [batch]: 1 where the more probable class is the target, else 0.

        Args:
            output: [batch, 2], logits.
            batch: the batch that was answered.

        Raises:
            ValueError: `output` has another shape.
        """
        require_shape("output", output, (len(batch), 2))
        return {"correct": is_correct(output[:, None], batch, 2)}

    def _make(self, split: str) -> ExampleSet:
        size = self.config.size(split)
        equilateral = np.arange(size) < size // 2
        corners = np.concatenate([self._corners(split, True), self._corners(split, False)])
        if split != "train":
            order = balanced_order(equilateral, self._key.generator(f"/order/{split}"))
            equilateral, corners = equilateral[order], corners[order]

        draws = self._key.generator(f"/points/{split}").random((size, 3, len(_OFFSETS)))
        offsets = _OFFSETS[draws.argsort(-1)[..., : _POINTS // 2]]
        offsets = np.concatenate([offsets, -offsets], 2)
        points = small(corners[:, :, None] + offsets)
        z = _complex(corners)
        return ExampleSet(
            inputs=points,
            targets=small(equilateral).to(torch.int8),
            latents={
                "equilateral": small(equilateral),
                "corners": small(corners),
                "offsets": small(offsets),
                "points": points,
                "side": _single(_sides(z)),
                "defect": _single(_defect(z)),
            },
            show=self._render,
        )

    @property
    def _variables(self) -> dict[str, Variable]:
        last, longest = self.config.image_size - 1 - _REACH, 2 * self.config.image_size
        anything = Allowed("True or False", lambda new, _: torch.ones_like(new))
        return {
            "corners": Variable(allowed=integers(_REACH, last)),
            "offsets": Variable(allowed=integers(-_REACH, _REACH)),
            "points": Variable(
                causes=("corners", "offsets"),
                compute=lambda corners, offsets: corners[:, :, None] + offsets,
            ),
            "side": Variable(
                causes=("corners",), compute=lambda corners: _single(_sides(_complex(corners)))
            ),
            "defect": Variable(
                causes=("corners",),
                compute=lambda corners: _single(_defect(_complex(corners))),
                allowed=numbers(0, longest),
            ),
            "equilateral": Variable(
                causes=("defect",), compute=lambda defect: defect <= _UNCLEAR, allowed=anything
            ),
            "inputs": Variable(causes=("points",), compute=self._render),
            "targets": Variable(
                causes=("equilateral",), compute=lambda equilateral: equilateral[:, None].long()
            ),
            "mask": Variable(causes=("corners",), compute=_are_clear),
        }

    def _render(
        self, points: Int[Tensor, "batch corner point 2"]
    ) -> Float[Tensor, "batch 1 height width"]:
        size = self.config.image_size
        pixel = (size * points[..., 1] + points[..., 0]).flatten(1)
        image = torch.zeros(len(points), size * size, device=points.device)
        return image.scatter_(1, pixel, 1.0).view(-1, 1, size, size)

    def _corners(self, split: str, equilateral: bool) -> Int[np.ndarray, "n corner 2"]:
        """Return the triangles of one class: `test` gets the first ones drawn, then `valid`."""
        counts = {}
        for name in ("test", "valid", "train"):
            half = self.config.size(name) // 2
            counts[name] = half if equilateral else self.config.size(name) - half
            if name == split:
                break
        n = sum(counts.values())
        generator = self._key.generator("/equilateral" if equilateral else "/others")
        triangles = np.empty((0, 3), np.complex128)
        while len(triangles) < n:
            triangles = np.concatenate([triangles, self._candidates(generator, equilateral)])
            # The same three corners in another order are the same triangle.
            pixels = np.sort(triangles.real + self.config.image_size * triangles.imag)
            first = np.unique(pixels, axis=0, return_index=True)[1]
            triangles = triangles[np.sort(first)]
        triangles = triangles[n - counts[split] : n]
        return np.stack([triangles.real, triangles.imag], -1).astype(np.int64)

    def _candidates(
        self, generator: np.random.Generator, equilateral: bool
    ) -> Complex[np.ndarray, "candidate corner"]:
        """Draw triangles and return the valid ones, as x + i y."""
        last = self.config.image_size - 1 - _REACH
        drawn = generator.integers(_REACH, last, (2, _CHUNK, 3), endpoint=True)
        z = drawn[0] + 1j * drawn[1]
        if equilateral:
            third = z[:, 0] + _APEX * (z[:, 1] - z[:, 0])
            z[:, 2] = np.rint(third.real) + 1j * np.rint(third.imag)
        inside = (np.minimum(z.real, z.imag) >= _REACH) & (np.maximum(z.real, z.imag) <= last)
        allowed = inside.all(1) & _is_long(z)
        if not equilateral:
            allowed &= _is_other(z)
        return z[allowed]

    def _groups(self, train: ExampleSet) -> list[Int[np.ndarray, " member"]]:
        return [np.arange(len(train))]


def _complex(corners: "Int[np.ndarray | Tensor, 'n corner 2']") -> Complex[np.ndarray, "n corner"]:
    x, y = np.moveaxis(np.asarray(corners), -1, 0)
    return x + 1j * y


def _single(values: Float[np.ndarray, "*shape"]) -> Float[Tensor, "*shape"]:
    return torch.from_numpy(values.astype(np.float32))


def _sides(z: Complex[np.ndarray, "n corner"]) -> Float[np.ndarray, "n side"]:
    return np.abs(np.roll(z, -1, 1) - z)


def _defect(z: Complex[np.ndarray, "n corner"]) -> Float[np.ndarray, " n"]:
    """Return the distance of the third corner from the nearer of the two equilateral apexes.

    It is the same for each corner: |a + w b + w^2 c|, where w rotates by 120 degrees, one way or
    the other.
    """
    first, second, third = z.T
    return np.minimum(
        np.abs(third - first - _APEX * (second - first)),
        np.abs(third - first - _APEX.conj() * (second - first)),
    )


def _is_long(z: Complex[np.ndarray, "n corner"]) -> Bool[np.ndarray, " n"]:
    return _sides(z).min(1) >= _SHORTEST


def _is_other(z: Complex[np.ndarray, "n corner"]) -> Bool[np.ndarray, " n"]:
    """Return whether triangles are clearly not equilateral."""
    return (_defect(z) > _UNCLEAR) & (np.ptp(_sides(z), 1) > _UNCLEAR)


def _are_clear(corners: Int[Tensor, "n corner 2"]) -> Bool[Tensor, "n 1"]:
    """Return whether triangles are equilateral, or clearly not, and not too small."""
    z = _complex(corners)
    is_clear = (_defect(z) <= _ROUNDED) | _is_other(z)
    return torch.from_numpy(_is_long(z) & is_clear)[:, None]
