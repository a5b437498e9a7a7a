"""Sort-of-CLEVR: Santoro et al. 2017, "A simple neural network module for relational reasoning",
section 4.2; with ternary questions, as used by Mittal et al. 2021, "Compositional Attention".

A picture shows six objects, each of a colour of its own. A question names one or two of the
colours; to answer it, one, two or all of the objects must be looked at.
"""

from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tasks.batch import Batch
from tasks.common import Key, require_int
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
"""The name of each colour, and so of each object."""

_YES, _NO, _RECTANGLE, _COUNT = 0, 1, 2, 3  # a circle is one more; so is a count of one
_PER_TYPE = 10  # questions of each type about a picture
_N = len(_RGB)
_WIDTH = 75
_RADIUS = 5  # also half the side of a square; the middle pixel does not count
_CHUNK = 2**14  # pictures drawn at a time: which ones there are does not depend on how many


@dataclass(frozen=True, kw_only=True)
class SortOfClevrConfig:
    """How many pictures there are. The defaults of `train` and `test` are the paper's.

    Attributes:
        n_train, n_valid, n_test: pictures of each split, 1 to 100,000; each has 30 questions.
        omit_yellow: ternary questions never name yellow, as in the public generator.
        seed: chooses the pictures, the questions and their order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.
    """

    n_train: int = 9_800
    n_valid: int = 200
    n_test: int = 200
    omit_yellow: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n_train", "n_valid", "n_test"):
            require_int(name, getattr(self, name), 1, 100_000)
        if not isinstance(self.omit_yellow, bool):
            raise ValueError(f"omit_yellow={self.omit_yellow!r}: allowed are True and False")
        require_int("seed", self.seed, 0, 2**32 - 1)

    def size(self, split: str) -> int:
        """Return the number of pictures of a split."""
        return {"train": self.n_train, "valid": self.n_valid, "test": self.n_test}[split]


class SortOfClevr(FiniteTask[tuple[Tensor, Tensor]]):
    """The sampler of Sort-of-CLEVR.

    A picture is white, 75 x 75 pixels, with a square or a circle of each of the six colours, either
    with probability 1/2; both are 11 pixels wide. Objects lie within the picture, and not even the
    squares around circles overlap. No object has two that are closest to it, or two that are
    furthest away. All distances are between centres.

    About each picture ten different questions of each type are asked, all equally probable:

    - unary, about one colour: its `shape`; is it on the `left` half, is it `above` the middle?
      (On the middle line it is not.)
    - binary, about one colour: the shape of the `closest` and of the `furthest` other object; how
      many objects have the `same` shape, itself included?
    - ternary, about two colours: how many of the other four lie `between` both, in the rectangle
      that they span (its border included); or in the `line`, the band of 5 pixels on either side
      of the line through both; or form an `obtuse` triangle with both (more than 90 degrees; three
      on one line form none)?

    Of the ten answers, "no" also stands for a count of zero; no other count is shifted.

    Splits: `train`, `valid` and `test`, each with pictures of its own. Every prefix of `valid` and
    `test` is balanced over question types. The pictures of a split, and the questions about them,
    do not depend on how many there are: of a smaller one they are the first.

    A batch holds the inputs (image, question): image [batch, 3, 75, 75] float32, red, green and
    blue from 0 to 1; question [batch, 18] float32, the first colour (one-hot, 6), the second one
    (6, or zeros), the type (3) and the subtype (3); targets [batch, 1] int64, indices into
    `SORT_OF_CLEVR_ANSWERS`; mask [batch, 1], all True; and the latents (int64 but for the last)
    `question_type` [batch], `subtype` [batch]: see `SORT_OF_CLEVR_QUESTIONS`;
    `colours` [batch, 2]: those named, -1 for none;
    `positions` [batch, object, 2]: (x, y), columns from the left and rows from the top;
    `shapes` [batch, object]: 0 for a square, 1 for a circle; object i has the colour i;
    `image` [batch]: the picture's number in the split;
    `objects_concerned` [batch, object] bool: those named, and those found or counted.
    """

    SPLITS: ClassVar = ("train", "valid", "test")

    def __init__(self, config: SortOfClevrConfig) -> None:
        # Neither numbers nor questions change which pictures there are.
        key = Key(replace(config, n_train=1, n_valid=1, n_test=1, omit_yellow=False))
        super().__init__(key=key)
        self.config = config

    def chance(self, split: str) -> dict[str, float]:
        """Return the accuracy of one who reads the questions, but sees no picture.

        The answer is always the one which is most frequent in `train` for the type and subtype.

        Returns:
            The share of right answers for each question type.

        Raises:
            ValueError: `split` is unknown.
        """
        tested, known = self._examples(split), self._examples("train")
        counts = np.zeros((3, 3, len(SORT_OF_CLEVR_ANSWERS)))
        np.add.at(counts, (*_kind(known), known.targets.numpy()), 1)
        question_type, subtype = _kind(tested)
        right = counts.argmax(-1)[question_type, subtype] == tested.targets.numpy()
        return {
            name: right[question_type == one].mean().item()
            for one, name in enumerate(SORT_OF_CLEVR_QUESTIONS)
        }

    def groups(self, batch: Batch[tuple[Tensor, Tensor]]) -> dict[str, Bool[Tensor, " batch"]]:
        """Return which questions are of which type, and of which subtype: `unary`, `unary: left`.

        Types come first; see `SORT_OF_CLEVR_QUESTIONS`.
        """
        types, subtypes = batch.latents["question_type"], batch.latents["subtype"]
        found = {name: types == one for one, name in enumerate(SORT_OF_CLEVR_QUESTIONS)}
        for name, names in SORT_OF_CLEVR_QUESTIONS.items():
            for number, subtype in enumerate(names):
                found[f"{name}: {subtype}"] = found[name] & (subtypes == number)
        return found

    def score(
        self, output: Float[Tensor, "batch 10"], batch: Batch[tuple[Tensor, Tensor]]
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return whether the most probable answer is right.

        Args:
            output: [batch, 10], logits.
            batch: the batch that they answer.

        Returns:
            `correct` [batch]: 1 where it is right, else 0.

        Raises:
            ValueError: `output` has another shape.
        """
        expected = (len(batch), len(SORT_OF_CLEVR_ANSWERS))
        if tuple(output.shape) != expected:
            raise ValueError(f"output of shape {tuple(output.shape)}: allowed is {expected}")
        return {"correct": (output.argmax(-1) == batch.targets[:, 0]).float()}

    def _make(self, split: str) -> ExampleSet[tuple[Tensor, Tensor]]:
        n = self.config.size(split)
        positions, shapes = self._pictures(split)
        image = np.arange(n).repeat(_PER_TYPE)
        parts = []
        for question_type, answering in enumerate((_unary, _binary, _ternary)):
            questions = self._questions(question_type)
            generator = self._key.generator(f"/questions/{split}/{question_type}")
            draws = generator.random((n, len(questions)))
            asked = questions[draws.argsort(1)[:, :_PER_TYPE].ravel()]
            answer, found = answering(asked, positions[image], shapes[image])
            named = (asked[:, 2:, None] == np.arange(_N)).any(1)
            parts.append((image, asked, answer, named | found))
        image, asked, answer, concerned = map(np.concatenate, zip(*parts, strict=True))
        if split != "train":
            order = balanced_order(asked[:, 0], self._key.generator(f"/order/{split}"))
            image, asked, answer, concerned = (
                values[order] for values in (image, asked, answer, concerned)
            )

        objects = small(np.concatenate([positions, shapes[..., None]], -1)[image])
        question = small(asked)
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
            show=_show,
        )

    def _questions(self, question_type: int) -> Int[np.ndarray, "question 4"]:
        """Return all questions of a type: type, subtype, both colours, -1 for none."""
        if question_type == 2:  # ternary
            colours = list(permutations(range(_N - self.config.omit_yellow), 2))
        else:
            colours = [(colour, -1) for colour in range(_N)]
        return np.array([(question_type, one, *both) for one, both in product(range(3), colours)])

    def _pictures(
        self, split: str
    ) -> tuple[Int[np.ndarray, "image object 2"], Int[np.ndarray, "image object"]]:
        """Return where the objects of every picture are, and their shapes."""
        n = self.config.size(split)
        generator = self._key.generator(f"/positions/{split}")
        found = np.empty((0, _N, 2), np.int64)
        while len(found) < n:
            found = np.concatenate([found, _candidates(generator)])
        shapes = self._key.generator(f"/shapes/{split}").integers(0, 2, (n, _N))
        return found[:n], shapes

    def _groups(self, train: ExampleSet[tuple[Tensor, Tensor]]) -> list[Int[np.ndarray, " member"]]:
        return [np.arange(len(train))]


def _kind(
    examples: ExampleSet[tuple[Tensor, Tensor]],
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Return types and subtypes."""
    return examples.latents["question_type"].numpy(), examples.latents["subtype"].numpy()


def _candidates(generator: np.random.Generator) -> Int[np.ndarray, "candidate object 2"]:
    """Draw positions; return those of pictures that are allowed."""
    at = generator.integers(_RADIUS, _WIDTH - _RADIUS, (_CHUNK, _N, 2))
    apart = np.abs(at[:, :, None] - at[:, None])
    clear = (apart > 2 * _RADIUS).any(-1) | np.eye(_N, dtype=bool)
    at, apart = at[clear.all((1, 2))], apart[clear.all((1, 2))]
    distance = np.sort((apart**2).sum(-1))  # squared, and so exact; the first is to itself
    tied = (distance[..., 1] == distance[..., 2]) | (distance[..., -2] == distance[..., -1])
    return at[~tied.any(1)]


# Each of the following answers questions of one type, and tells which objects it found or counted
# beside those that are named.


def _unary(
    asked: Int[np.ndarray, "question 4"],
    positions: Int[np.ndarray, "question object 2"],
    shapes: Int[np.ndarray, "question object"],
) -> tuple[Int[np.ndarray, " question"], Bool[np.ndarray, "question object"]]:
    rows = np.arange(len(asked))
    _, subtype, colour, _ = asked.T
    x, y = positions[rows, colour].T
    answers = [
        _RECTANGLE + shapes[rows, colour],
        np.where(x < _WIDTH // 2, _YES, _NO),
        np.where(y < _WIDTH // 2, _YES, _NO),
    ]
    return _choose(subtype, answers), np.zeros_like(shapes, dtype=bool)


def _binary(
    asked: Int[np.ndarray, "question 4"],
    positions: Int[np.ndarray, "question object 2"],
    shapes: Int[np.ndarray, "question object"],
) -> tuple[Int[np.ndarray, " question"], Bool[np.ndarray, "question object"]]:
    rows = np.arange(len(asked))
    _, subtype, colour, _ = asked.T
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
    one = np.eye(_N, dtype=bool)
    return _choose(subtype, answers), _choose(subtype, [one[closest], one[furthest], same])


def _ternary(
    asked: Int[np.ndarray, "question 4"],
    positions: Int[np.ndarray, "question object 2"],
    shapes: Int[np.ndarray, "question object"],
) -> tuple[Int[np.ndarray, " question"], Bool[np.ndarray, "question object"]]:
    rows = np.arange(len(asked))
    _, subtype, colour, other = asked.T
    first, second = positions[rows, colour][:, None], positions[rows, other][:, None]
    side, to_first, to_second = second - first, first - positions, second - positions
    across = to_first[..., 0] * to_second[..., 1] - to_first[..., 1] * to_second[..., 0]
    # The angles at the first, at the second and at the third object.
    cosines = [(-side * to_first), (side * to_second), (to_first * to_second)]
    obtuse = np.any([cosine.sum(-1) < 0 for cosine in cosines], axis=0)
    counted = [
        (to_first * to_second <= 0).all(-1),
        across**2 <= _RADIUS**2 * (side**2).sum(-1),  # across: distance from the line times side
        obtuse & (across != 0),
    ]
    found = _choose(subtype, counted)
    found[rows, colour] = found[rows, other] = False
    count = found.sum(1)
    return np.where(count, _COUNT + count, _NO), found


def _choose(subtype: Int[np.ndarray, " n"], values: list[np.ndarray]) -> np.ndarray:
    """Return, for each question, the value of its subtype."""
    return np.stack(values)[subtype, np.arange(len(subtype))]


def _show(inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Draw pictures, and write questions as vectors.

    Args:
        inputs: objects [batch, object, 3], x, y and shape; and questions [batch, 4], type, subtype
            and both colours.

    Returns:
        image [batch, 3, 75, 75] and question [batch, 18].
    """
    objects, asked = inputs
    n, device = len(objects), objects.device
    reach = torch.arange(-_RADIUS, _RADIUS + 1, device=device)
    square = _WIDTH * reach[:, None] + reach
    pixel = (_WIDTH * objects[..., 1] + objects[..., 0])[..., None] + square.flatten()
    # Nothing overlaps the square around a circle, so what it leaves is drawn white.
    round_off = reach.square()[:, None] + reach.square() > (_RADIUS + 0.5) ** 2
    white = (objects[..., 2, None] == 1) & round_off.flatten()
    image = torch.ones(n, 3, _WIDTH * _WIDTH, device=device)
    for channel, level in enumerate(zip(*_RGB.values(), strict=True)):
        shade = torch.tensor(level, device=device)[:, None] / 255
        image[:, channel].scatter_(1, pixel.flatten(1), torch.where(white, 1.0, shade).flatten(1))

    question_type, subtype, colour, other = asked.T
    other = torch.where(other < 0, colour, _N + other)  # no second colour: the first once more
    ones = torch.stack([colour, other, 2 * _N + question_type, 2 * _N + 3 + subtype], 1)
    question = torch.zeros(n, 2 * _N + 6, device=device).scatter_(1, ones, 1.0)
    return image.view(n, 3, _WIDTH, _WIDTH), question
