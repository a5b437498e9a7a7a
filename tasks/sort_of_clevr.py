"""Sort-of-CLEVR: Santoro et al. 2017, "A simple neural network module for relational reasoning",
section 4.2; with ternary questions, as used by Mittal et al. 2021, "Compositional Attention".

An image shows six objects of different colours. A question names one or two of the colours; its
answer depends on one, two or all of the objects.
"""

from dataclasses import dataclass
from itertools import permutations, product
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tasks.answers import is_correct
from tasks.batch import Batch
from tasks.causal import Allowed, CausalTask, Entries, Variable, integers
from tasks.common import Key, require_bool, require_choice, require_int, require_shape
from tasks.finite import ExampleSet, balanced_order, small
from tasks.finite_task import FiniteTask
from tasks.sort_of_clevr_scenes import (
    N_OBJECTS,
    RADIUS,
    SORT_OF_CLEVR_ANSWERS,
    SORT_OF_CLEVR_QUESTIONS,
    WIDTH,
    Problems,
    are_valid,
    render,
    solve,
)

_PER_TYPE = 10  # questions of each type about an image
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

    Example:
        >>> task = SortOfClevr(SortOfClevrConfig(n_train=2, n_valid=1, n_test=1))
        >>> task.size("train")  # 30 questions about each of two images
        60
        >>> image, question = task.batch("train", 0, 8).inputs
        >>> image.shape, question.shape
        (torch.Size([8, 3, 75, 75]), torch.Size([8, 18]))
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
        """Return the number of images of a split.

        Raises:
            ValueError: `split` is unknown.
        """
        sizes = {"train": self.n_train, "valid": self.n_valid, "test": self.n_test}
        require_choice("split", split, tuple(sizes))
        return sizes[split]


@dataclass(frozen=True)
class _Scenes:
    """What the random choices depend on: the seed; the others are the names of old settings."""

    seed: int
    n_train: int = 1
    n_valid: int = 1
    n_test: int = 1
    omit_yellow: bool = False


class SortOfClevr(FiniteTask[tuple[Tensor, Tensor]], CausalTask[tuple[Tensor, Tensor]]):
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

    Causal model: the question (its type, subtype and colours), positions and shapes can be set; a
    question that is not ternary has no second colour. `image` stays the number of the image that
    the example comes from. The mask is False where a ternary question has no two colours, and where
    objects overlap or have several closest or furthest others.

    Example:
        >>> SortOfClevr(SortOfClevrConfig(n_train=100)).batch("train", 0, 64)
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
        image = np.tile(np.arange(n).repeat(_PER_TYPE), len(SORT_OF_CLEVR_QUESTIONS))
        parts = []
        for question_type in range(len(SORT_OF_CLEVR_QUESTIONS)):
            candidates = self._questions(question_type)
            generator = self._key.generator(f"/questions/{split}/{question_type}")
            draws = generator.random((n, len(candidates)))
            parts.append(candidates[draws.argsort(1)[:, :_PER_TYPE].ravel()])
        questions = np.concatenate(parts)
        answer, concerned = solve(Problems(questions, positions[image], shapes[image]))
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
            show=render,
        )

    @property
    def _variables(self) -> dict[str, Variable]:
        question, scene = ("question_type", "subtype", "colours"), ("positions", "shapes")
        colours = Allowed(
            f"colours from 0 to {N_OBJECTS - 1}, the second or -1 for none",
            lambda new, _: (new >= torch.tensor([0, -1])) & (new < N_OBJECTS),
        )
        return {
            "question_type": Variable(allowed=integers(0, 2)),
            "subtype": Variable(allowed=integers(0, 2)),
            "colours": Variable(
                causes=("question_type",),
                compute=_named,
                allowed=colours,
                within=True,
                exogenous=True,
            ),
            "positions": Variable(allowed=integers(RADIUS, WIDTH - RADIUS - 1)),
            "shapes": Variable(allowed=integers(0, 1)),
            "image": Variable(),
            "objects_concerned": Variable(
                causes=(*question, *scene), compute=lambda *causes: _solved(*causes)[1]
            ),
            "inputs": Variable(causes=(*question, *scene), compute=_shown),
            "targets": Variable(
                causes=(*question, *scene), compute=lambda *causes: _solved(*causes)[0]
            ),
            "mask": Variable(causes=("question_type", "colours", "positions"), compute=_is_clear),
        }

    def _questions(self, question_type: int) -> Int[np.ndarray, "question 4"]:
        """Return all questions of a type: type, subtype and two colours, -1 for none."""
        if question_type == 2:  # ternary
            colours = list(permutations(range(N_OBJECTS - self.config.omit_yellow), 2))
        else:
            colours = [(colour, -1) for colour in range(N_OBJECTS)]
        return np.array(
            [(question_type, subtype, *pair) for subtype, pair in product(range(3), colours)]
        )

    def _scenes(
        self, split: str
    ) -> tuple[Int[np.ndarray, "image object 2"], Int[np.ndarray, "image object"]]:
        """Return the positions and the shapes of the objects of every image."""
        n = self.config.size(split)
        generator = self._key.generator(f"/positions/{split}")
        positions = np.empty((0, N_OBJECTS, 2), np.int64)
        while len(positions) < n:
            positions = np.concatenate([positions, _candidates(generator)])
        shapes = self._key.generator(f"/shapes/{split}").integers(0, 2, (n, N_OBJECTS))
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
    positions = generator.integers(RADIUS, WIDTH - RADIUS, (_CHUNK, N_OBJECTS, 2))
    return positions[are_valid(positions)]


def _named(question_type: Int[Tensor, " n"], entries: Entries) -> Int[Tensor, "n 2"]:
    """Return the colours, of which only ternary questions have two."""
    first, second = entries.values.unbind(1)
    return torch.stack([first, torch.where(question_type == 2, second, -1)], 1)


def _solved(
    question_type: Int[Tensor, " n"],
    subtype: Int[Tensor, " n"],
    colours: Int[Tensor, "n 2"],
    positions: Int[Tensor, "n object 2"],
    shapes: Int[Tensor, "n object"],
) -> tuple[Int[Tensor, "n 1"], Bool[Tensor, "n object"]]:
    questions = torch.stack([question_type, subtype, *colours.T], 1)
    problems = Problems(questions.numpy(), positions.numpy(), shapes.numpy())
    answer, concerned = map(torch.from_numpy, solve(problems))
    return answer[:, None], concerned


def _shown(
    question_type: Int[Tensor, " n"],
    subtype: Int[Tensor, " n"],
    colours: Int[Tensor, "n 2"],
    positions: Int[Tensor, "n object 2"],
    shapes: Int[Tensor, "n object"],
) -> tuple[Float[Tensor, "n 3 height width"], Float[Tensor, "n feature"]]:
    objects = torch.cat([positions, shapes[..., None]], -1)
    return render((objects, torch.stack([question_type, subtype, *colours.T], 1)))


def _is_clear(
    question_type: Int[Tensor, " n"],
    colours: Int[Tensor, "n 2"],
    positions: Int[Tensor, "n object 2"],
) -> Bool[Tensor, "n 1"]:
    """Return whether a question has its colours, and its scene is one of the sampler's."""
    first, second = colours.T
    is_question = torch.where(question_type == 2, (second >= 0) & (second != first), second < 0)
    return (is_question & torch.from_numpy(are_valid(positions.numpy())))[:, None]
