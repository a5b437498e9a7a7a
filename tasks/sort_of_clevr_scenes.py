"""Scenes and questions of Sort-of-CLEVR: their answers and pictures (Santoro et al. 2017)."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

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
N_OBJECTS = len(_RGB)
WIDTH = 75
"""Width and height of an image in pixels."""

RADIUS = 5
"""Of a circle; also half the side of a square, without the central pixel."""


def are_valid(positions: Int[np.ndarray, "scene object 2"]) -> Bool[np.ndarray, " scene"]:
    """Return whether no objects overlap, and closest and furthest others are unique."""
    offset = np.abs(positions[:, :, None] - positions[:, None])
    is_clear = np.asarray(
        ((offset > 2 * RADIUS).any(-1) | np.eye(N_OBJECTS, dtype=bool)).all((1, 2))
    )
    distance = np.sort((offset[is_clear] ** 2).sum(-1))  # squared, so exact; first, to itself
    tied = (distance[..., 1] == distance[..., 2]) | (distance[..., -2] == distance[..., -1])
    is_clear[is_clear] = ~tied.any(1)
    return is_clear


class Problems(NamedTuple):
    """Questions, each with the scene that it is about."""

    questions: Int[np.ndarray, "question 4"]
    positions: Int[np.ndarray, "question object 2"]
    shapes: Int[np.ndarray, "question object"]


Solutions = tuple[Int[np.ndarray, " question"], Bool[np.ndarray, "question object"]]
"""Answers, and the objects that each describes or counts besides those of the question."""


def solve(problems: Problems) -> Solutions:
    """Return answers, and the objects of each question and those of its answer."""
    questions = problems.questions
    answer = np.empty(len(questions), np.int64)
    concerned = (questions[:, 2:, None] == np.arange(N_OBJECTS)).any(1)
    for question_type, solve_type in enumerate((_unary, _binary, _ternary)):
        rows = np.flatnonzero(questions[:, 0] == question_type)
        answer[rows], relevant = solve_type(Problems(*(part[rows] for part in problems)))
        concerned[rows] |= relevant
    return answer, concerned


def _unary(problems: Problems) -> Solutions:
    questions, positions, shapes = problems
    rows = np.arange(len(questions))
    _, subtype, colour, _ = questions.T
    x, y = positions[rows, colour].T
    answers = [
        _RECTANGLE + shapes[rows, colour],
        np.where(x < WIDTH // 2, _YES, _NO),
        np.where(y < WIDTH // 2, _YES, _NO),
    ]
    return _choose(subtype, answers), np.zeros_like(shapes, dtype=bool)


def _binary(problems: Problems) -> Solutions:
    questions, positions, shapes = problems
    rows = np.arange(len(questions))
    _, subtype, colour, _ = questions.T
    distance = ((positions - positions[rows, colour][:, None]) ** 2).sum(-1)
    furthest = distance.argmax(1)
    distance[rows, colour] = distance.max(initial=0)
    closest = distance.argmin(1)
    same = shapes == shapes[rows, colour][:, None]
    answers = [
        _RECTANGLE + shapes[rows, closest],
        _RECTANGLE + shapes[rows, furthest],
        _COUNT + same.sum(1),
    ]
    one_hot = np.eye(N_OBJECTS, dtype=bool)
    relevant = [one_hot[closest], one_hot[furthest], same]
    return _choose(subtype, answers), _choose(subtype, relevant)


def _ternary(problems: Problems) -> Solutions:
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
        cross**2 <= RADIUS**2 * (side**2).sum(-1),
        obtuse & (cross != 0),
    ]
    counted = _choose(subtype, candidates)
    counted[rows, colour] = counted[rows, other] = False
    count = counted.sum(1)
    return np.where(count, _COUNT + count, _NO), counted


def _choose(subtype: Int[np.ndarray, " n"], values: list[np.ndarray]) -> np.ndarray:
    """Return, for each question, the value of its subtype."""
    return np.stack(values)[subtype, np.arange(len(subtype))]


def render(inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Draw the images and encode the questions.

    Args:
        inputs: objects [batch, object, 3], x, y and shape; and questions [batch, 4], type, subtype
            and both colours.

    Returns:
        image [batch, 3, 75, 75] and question [batch, 18].
    """
    objects, questions = inputs
    n, device = len(objects), objects.device
    offset = torch.arange(-RADIUS, RADIUS + 1, device=device)
    square = WIDTH * offset[:, None] + offset
    pixel = (WIDTH * objects[..., 1] + objects[..., 0])[..., None] + square.flatten()
    # The squares around circles do not overlap, so their corners are drawn white.
    is_corner = offset.square()[:, None] + offset.square() > (RADIUS + 0.5) ** 2
    white = (objects[..., 2, None] == 1) & is_corner.flatten()
    image = torch.ones(n, 3, WIDTH * WIDTH, device=device)
    for channel, level in enumerate(zip(*_RGB.values(), strict=True)):
        shade = torch.tensor(level, device=device)[:, None] / 255
        image[:, channel].scatter_(1, pixel.flatten(1), torch.where(white, 1.0, shade).flatten(1))

    question_type, subtype, colour, other = questions.T
    other = torch.where(other < 0, colour, N_OBJECTS + other)  # no second colour: repeat the first
    ones = torch.stack(
        [colour, other, 2 * N_OBJECTS + question_type, 2 * N_OBJECTS + 3 + subtype], 1
    )
    question = torch.zeros(n, 2 * N_OBJECTS + 6, device=device).scatter_(1, ones, 1.0)
    return image.view(n, 3, WIDTH, WIDTH), question
