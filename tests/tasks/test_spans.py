import pytest
import torch

from tasks.spans import best_spans, normalized, score_answer


@pytest.mark.parametrize("longest", [1, 2, 6])
def test_the_best_span_is_that_of_a_search_over_all(longest):
    logits = torch.randn(50, 2, 6, generator=torch.Generator().manual_seed(0))
    logits[:25, :, 4:] = -torch.inf
    starts, ends = best_spans(logits, longest)
    for i, probabilities in enumerate(logits.softmax(-1).tolist()):
        spans = [(s, e) for s in range(6) for e in range(s, min(6, s + longest))]
        best = max(spans, key=lambda span: probabilities[0][span[0]] * probabilities[1][span[1]])
        assert (starts[i], ends[i]) == best


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The  U.S. of A!", "us of"),
        ("an apple, a day", "apple day"),
        ("theatre", "theatre"),
        ("Don't", "dont"),
        ("the", ""),
    ],
)
def test_answers_are_normalized_as_in_squad(answer, expected):
    assert normalized(answer) == expected


@pytest.mark.parametrize(
    ("answer", "golds", "expected"),
    [
        ("The Cat", ["cat"], (1, 1)),
        ("black cat", ["cat"], (0, 2 / 3)),
        ("black cat", ["dog", "a black cat!"], (1, 1)),
        ("black cat", ["cat", "black dog"], (0, 2 / 3)),
        ("cat cat dog", ["cat dog dog"], (0, 4 / 6)),
        ("bird", ["cat"], (0, 0)),
        ("the", ["cat"], (0, 0)),
        ("the", ["an"], (1, 1)),
    ],
)
def test_the_best_of_several_right_answers_counts(answer, golds, expected):
    assert score_answer(answer, golds) == pytest.approx(expected)
