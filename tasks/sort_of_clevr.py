"""Sort-of-CLEVR: Santoro et al. 2017, "A simple neural network module for relational reasoning",
section 4.2; with ternary questions, as used by Mittal et al. 2021, "Compositional Attention".

An image shows six objects of different colours. A question names one or two of the colours; its
answer depends on one, two or all of the objects.
"""

from dataclasses import dataclass
from itertools import permutations, product
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tasks.answers import is_correct
from tasks.batch import Batch
from tasks.common import Key, require_bool, require_int, require_shape
from tasks.finite import ExampleSet, balanced_order, small
from tasks.finite_task import FiniteTask

SORT_OF_CLEVR_ANSWERS = ("yes", "no", "rectangle", "circle", "1", "2", "3", "4", "5", "6")
"""The name of each target."""

SORT_OF_CLEVR_QUESTIONS = {
    "unary": ("shape", "left", "above"),
    "binary": ("closest", "furthest", "same"),
    "ternary": ("between", "line", "obtuse"),
}
"""The question types, and the subtypes of each; their ids are the indices."""

_RGB = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "orange": (255, 156, 0),
    "grey": (128, 128, 128),
    "yellow": (255, 255, 0),
}

SORT_OF_CLEVR_COLOURS = tuple(_RGB)
"""The colours; each object is identified by its colour."""

_YES, _NO, _RECTANGLE, _COUNT = 0, 1, 2, 3  # a circle is _RECTANGLE + 1; a count n is _COUNT + n
_PER_TYPE = 10  # questions of each type about an image
_N = len(_RGB)
_WIDTH = 75
_RADIUS = 5  # also half the side of a square, without the central pixel
_CHUNK = 2**14  # images drawn at a time, whatever the size of the split


@dataclass(frozen=True, kw_only=True)
class SortOfClevrConfig:
    """Settings of Sort-of-CLEVR. The default sizes of `train` and `test` are the paper's.

    Attributes:
        n_train, n_valid, n_test: images of each split, 1 to 100,000; each has 30 questions.
        omit_yellow: whether ternary questions never name yellow, as in the public generator.
        by_type: whether a batch of `train` has questions of one type, the types taking turns, as in
            the public training script; else of all types.
        seed: seeds the images, the questions and their order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.
    """

    n_train: int = 9_800
    n_valid: int = 200
    n_test: int = 200
    omit_yellow: bool = False
    by_type: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n_train", "n_valid", "n_test"):
            require_int(name, getattr(self, name), 1, 100_000)
        require_bool("omit_yellow", self.omit_yellow)
        require_bool("by_type", self.by_type)
        require_int("seed", self.seed, 0, 2**32 - 1)

    def size(self, split: str) -> int:
        """Return the number of images of a split."""
        return {"train": self.n_train, "valid": self.n_valid, "test": self.n_test}[split]


@dataclass(frozen=True)
class _Scenes:
    """What the random choices depend on: the seed; the others are the names of old settings."""

    seed: int
    n_train: int = 1
    n_valid: int = 1
    n_test: int = 1
    omit_yellow: bool = False


class SortOfClevr(FiniteTask[tuple[Tensor, Tensor]]):
    """Sort-of-CLEVR.

    An image is white, 75 x 75 pixels, with a square or a circle of each of the six colours, either
    with probability 1/2; both are 11 pixels wide. Objects lie within the image, and neither they
    nor the squares around circles overlap. For each object, the closest and the furthest other
    object are unique. All distances are between centres.

    Each image has ten different questions of each type, all equally probable:

    - unary, about one colour: its `shape`; is it on the `left` half, is it `above` the middle?
      (On the middle line it is not.)
    - binary, about one colour: the shape of the `closest` and of the `furthest` other object; how
      many objects have the `same` shape, itself included?
    - ternary, about two colours: how many of the other four lie `between` both, in the rectangle
      that they span (its border included); or in the `line`, the band of 5 pixels on either side
      of the line through both; or form an `obtuse` triangle with both (more than 90 degrees;
      collinear objects form none)?

    The answer "no" also stands for a count of zero.

    Splits: `train`, `valid` and `test`, with different images. Every prefix of `valid` and `test`
    is balanced over question types. The images and questions of a smaller split are the first ones
    of a larger split.

    A batch has the inputs (image, question): image [batch, 3, 75, 75] float32, red, green and
    blue from 0 to 1; question [batch, 18] float32, the first colour (one-hot, 6), the second one
    (6, or zeros), the type (3) and the subtype (3); targets [batch, 1] int64, indices into
    `SORT_OF_CLEVR_ANSWERS`; mask [batch, 1], all True; and the latents (int64 but for the last)
    `question_type` [batch], `subtype` [batch]: see `SORT_OF_CLEVR_QUESTIONS`;
    `colours` [batch, 2]: the colours of the question, -1 for none;
    `positions` [batch, object, 2]: (x, y), columns from the left and rows from the top;
    `shapes` [batch, object]: 0 for a square, 1 for a circle; object i has the colour i;
    `image` [batch]: the image's number in the split;
    `objects_concerned` [batch, object] bool: the objects of the question, and those that the answer
    describes or counts.

    Example:
        `SortOfClevr(SortOfClevrConfig(n_train=100)).batch("train", 0, 64)`
    """

    SPLITS: ClassVar = ("train", "valid", "test")

    def __init__(self, config: SortOfClevrConfig) -> None:
        # The images do not depend on the sizes of the splits or on the questions.
        key = Key(_Scenes(seed=config.seed))
        super().__init__(key=key, by_batch=config.by_type)
        self.config = config

    def chance(self, split: str) -> dict[str, float]:
        """Return the accuracy of answering from the question alone.

        The prediction is the most frequent answer in `train` for the question's type and subtype.

        Returns:
            The accuracy for each question type.

        Raises:
            ValueError: `split` is unknown.
        """
        test, train = self._examples(split), self._examples("train")
        counts = np.zeros((3, 3, len(SORT_OF_CLEVR_ANSWERS)))
        np.add.at(counts, (*_types_and_subtypes(train), train.targets.numpy()), 1)
        question_type, subtype = _types_and_subtypes(test)
        right = counts.argmax(-1)[question_type, subtype] == test.targets.numpy()
        return {
            name: right[question_type == index].mean().item()
            for index, name in enumerate(SORT_OF_CLEVR_QUESTIONS)
        }

    def groups(self, batch: Batch[tuple[Tensor, Tensor]]) -> dict[str, Bool[Tensor, " batch"]]:
        """Return the mask of each question type (`unary`), then of each subtype (`unary: left`)."""
        types, subtypes = batch.latents["question_type"], batch.latents["subtype"]
        masks = {name: types == index for index, name in enumerate(SORT_OF_CLEVR_QUESTIONS)}
        for name, names in SORT_OF_CLEVR_QUESTIONS.items():
            for index, subtype in enumerate(names):
                masks[f"{name}: {subtype}"] = masks[name] & (subtypes == index)
        return masks

    def score(
        self, output: Float[Tensor, "batch 10"], batch: Batch[tuple[Tensor, Tensor]]
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return `correct` [batch]: 1 where the most probable answer is the target, else 0.

        Args:
            output: [batch, 10], logits.
            batch: the batch that was answered.

        Raises:
            ValueError: `output` has another shape.
        """
        n_answers = len(SORT_OF_CLEVR_ANSWERS)
        require_shape("output", output, (len(batch), n_answers))
        return {"correct": is_correct(output[:, None], batch, n_answers)}

    def _make(self, split: str) -> ExampleSet[tuple[Tensor, Tensor]]:
        n = self.config.size(split)
        positions, shapes = self._scenes(split)
        image = np.arange(n).repeat(_PER_TYPE)
        parts = []
        for question_type, solve in enumerate((_unary, _binary, _ternary)):
            candidates = self._questions(question_type)
            generator = self._key.generator(f"/questions/{split}/{question_type}")
            draws = generator.random((n, len(candidates)))
            questions = candidates[draws.argsort(1)[:, :_PER_TYPE].ravel()]
            answer, relevant = solve(_Problems(questions, positions[image], shapes[image]))
            named = (questions[:, 2:, None] == np.arange(_N)).any(1)
            parts.append((image, questions, answer, named | relevant))
        image, questions, answer, concerned = map(np.concatenate, zip(*parts, strict=True))
        if split != "train":
            order = balanced_order(questions[:, 0], self._key.generator(f"/order/{split}"))
            image, questions, answer, concerned = (
                values[order] for values in (image, questions, answer, concerned)
            )

        objects = small(np.concatenate([positions, shapes[..., None]], -1)[image])
        question = small(questions)
        return ExampleSet(
            inputs=(objects, question),
            targets=small(answer),
            latents={
                "question_type": question[:, 0],
                "subtype": question[:, 1],
                "colours": question[:, 2:],
                "positions": objects[..., :2],
                "shapes": objects[..., 2],
                "image": torch.from_numpy(image),
                "objects_concerned": small(concerned),
            },
            show=_render,
        )

    def _questions(self, question_type: int) -> Int[np.ndarray, "question 4"]:
        """Return all questions of a type: type, subtype and two colours, -1 for none."""
        if question_type == 2:  # ternary
            colours = list(permutations(range(_N - self.config.omit_yellow), 2))
        else:
            colours = [(colour, -1) for colour in range(_N)]
        return np.array(
            [(question_type, subtype, *pair) for subtype, pair in product(range(3), colours)]
        )

    def _scenes(
        self, split: str
    ) -> tuple[Int[np.ndarray, "image object 2"], Int[np.ndarray, "image object"]]:
        """Return the positions and the shapes of the objects of every image."""
        n = self.config.size(split)
        generator = self._key.generator(f"/positions/{split}")
        positions = np.empty((0, _N, 2), np.int64)
        while len(positions) < n:
            positions = np.concatenate([positions, _candidates(generator)])
        shapes = self._key.generator(f"/shapes/{split}").integers(0, 2, (n, _N))
        return positions[:n], shapes

    def _groups(self, train: ExampleSet[tuple[Tensor, Tensor]]) -> list[Int[np.ndarray, " member"]]:
        if not self.config.by_type:
            return [np.arange(len(train))]
        question_type, _ = _types_and_subtypes(train)
        return [np.flatnonzero(question_type == index) for index in range(3)]


def _types_and_subtypes(
    examples: ExampleSet[tuple[Tensor, Tensor]],
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    return examples.latents["question_type"].numpy(), examples.latents["subtype"].numpy()


def _candidates(generator: np.random.Generator) -> Int[np.ndarray, "candidate object 2"]:
    """Draw positions and return those of valid images."""
    positions = generator.integers(_RADIUS, _WIDTH - _RADIUS, (_CHUNK, _N, 2))
    offset = np.abs(positions[:, :, None] - positions[:, None])
    is_clear = ((offset > 2 * _RADIUS).any(-1) | np.eye(_N, dtype=bool)).all((1, 2))
    positions, offset = positions[is_clear], offset[is_clear]
    distance = np.sort((offset**2).sum(-1))  # squared, so exact; the first is to itself
    tied = (distance[..., 1] == distance[..., 2]) | (distance[..., -2] == distance[..., -1])
    return positions[~tied.any(1)]


class _Problems(NamedTuple):
    """Questions, each with the scene that it is about."""

    questions: Int[np.ndarray, "question 4"]
    positions: Int[np.ndarray, "question object 2"]
    shapes: Int[np.ndarray, "question object"]


_Solutions = tuple[Int[np.ndarray, " question"], Bool[np.ndarray, "question object"]]
"""Answers, and the objects that each describes or counts besides those of the question."""


def _unary(problems: _Problems) -> _Solutions:
    questions, positions, shapes = problems
    rows = np.arange(len(questions))
    _, subtype, colour, _ = questions.T
    x, y = positions[rows, colour].T
    answers = [
        _RECTANGLE + shapes[rows, colour],
        np.where(x < _WIDTH // 2, _YES, _NO),
        np.where(y < _WIDTH // 2, _YES, _NO),
    ]
    return _choose(subtype, answers), np.zeros_like(shapes, dtype=bool)


def _binary(problems: _Problems) -> _Solutions:
    questions, positions, shapes = problems
    rows = np.arange(len(questions))
    _, subtype, colour, _ = questions.T
    distance = ((positions - positions[rows, colour][:, None]) ** 2).sum(-1)
    furthest = distance.argmax(1)
    distance[rows, colour] = distance.max()
    closest = distance.argmin(1)
    same = shapes == shapes[rows, colour][:, None]
    answers = [
        _RECTANGLE + shapes[rows, closest],
        _RECTANGLE + shapes[rows, furthest],
        _COUNT + same.sum(1),
    ]
    one_hot = np.eye(_N, dtype=bool)
    relevant = [one_hot[closest], one_hot[furthest], same]
    return _choose(subtype, answers), _choose(subtype, relevant)


def _ternary(problems: _Problems) -> _Solutions:
    questions, positions, _ = problems
    rows = np.arange(len(questions))
    _, subtype, colour, other = questions.T
    first, second = positions[rows, colour][:, None], positions[rows, other][:, None]
    side, to_first, to_second = second - first, first - positions, second - positions
    # The cross product: the distance from the line times the length of the side.
    cross = to_first[..., 0] * to_second[..., 1] - to_first[..., 1] * to_second[..., 0]
    # The angles at the first, at the second and at the third object.
    cosines = [(-side * to_first), (side * to_second), (to_first * to_second)]
    obtuse = np.any([cosine.sum(-1) < 0 for cosine in cosines], axis=0)
    candidates = [
        (to_first * to_second <= 0).all(-1),
        cross**2 <= _RADIUS**2 * (side**2).sum(-1),
        obtuse & (cross != 0),
    ]
    counted = _choose(subtype, candidates)
    counted[rows, colour] = counted[rows, other] = False
    count = counted.sum(1)
    return np.where(count, _COUNT + count, _NO), counted


def _choose(subtype: Int[np.ndarray, " n"], values: list[np.ndarray]) -> np.ndarray:
    """Return, for each question, the value of its subtype."""
    return np.stack(values)[subtype, np.arange(len(subtype))]


def _render(inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Draw the images and encode the questions.

    Args:
        inputs: objects [batch, object, 3], x, y and shape; and questions [batch, 4], type, subtype
            and both colours.

    Returns:
        image [batch, 3, 75, 75] and question [batch, 18].
    """
    objects, questions = inputs
    n, device = len(objects), objects.device
    offset = torch.arange(-_RADIUS, _RADIUS + 1, device=device)
    square = _WIDTH * offset[:, None] + offset
    pixel = (_WIDTH * objects[..., 1] + objects[..., 0])[..., None] + square.flatten()
    # The squares around circles do not overlap, so their corners are drawn white.
    is_corner = offset.square()[:, None] + offset.square() > (_RADIUS + 0.5) ** 2
    white = (objects[..., 2, None] == 1) & is_corner.flatten()
    image = torch.ones(n, 3, _WIDTH * _WIDTH, device=device)
    for channel, level in enumerate(zip(*_RGB.values(), strict=True)):
        shade = torch.tensor(level, device=device)[:, None] / 255
        image[:, channel].scatter_(1, pixel.flatten(1), torch.where(white, 1.0, shade).flatten(1))

    question_type, subtype, colour, other = questions.T
    other = torch.where(other < 0, colour, _N + other)  # no second colour: repeat the first
    ones = torch.stack([colour, other, 2 * _N + question_type, 2 * _N + 3 + subtype], 1)
    question = torch.zeros(n, 2 * _N + 6, device=device).scatter_(1, ones, 1.0)
    return image.view(n, 3, _WIDTH, _WIDTH), question
