"""BLEU, against cases that are computed by hand."""

import math
import sys
from unittest import mock

import pytest

from studies.measures.bleu import score_bleu


def bleu(translations, references, **options):
    return float(score_bleu(translations, references, resamples=0, **options).estimate)


def test_equal_texts_have_100_and_texts_without_a_common_word_0():
    texts = ["the cat sat on the mat", "a dog barks at night"]
    assert bleu(texts, texts) == pytest.approx(100)
    assert bleu(texts, ["x y z w", "u v x y z"]) == 0
    assert bleu(["", ""], texts) == 0


def test_short_translations_have_the_brevity_penalty():
    # All their words and their order are right: the penalty alone is left.
    reference = "a b c d e f g h i j"
    assert bleu(["a b c d e"], [reference]) == pytest.approx(100 * math.exp(1 - 10 / 5))
    # Long ones have none, but their precision is less: 10, 9, 8, 7 of 12, 11, 10, 9 match.
    expected = (10 / 12 * 9 / 11 * 8 / 10 * 7 / 9) ** (1 / 4)
    assert bleu([f"{reference} x y"], [reference]) == pytest.approx(100 * expected)


def test_matches_are_counted_over_all_sentences_together():
    translations = ["a b c d e", "p q r s"]
    references = ["a b c d f", "p q r s"]
    # Of both: words 4 + 4 of 9, pairs 3 + 3 of 7, triples 2 + 2 of 5, quadruples 1 + 1 of 3.
    expected = (8 / 9 * 6 / 7 * 4 / 5 * 2 / 3) ** (1 / 4)
    assert bleu(translations, references) == pytest.approx(100 * expected)


def test_a_word_counts_as_often_as_in_the_reference():
    # "the" twice of seven words; no pair matches, so that these are smoothed to 1/2, 1/4, 1/8 of
    # one match.
    expected = (2 / 7 * (1 / 2) / 6 * (1 / 4) / 5 * (1 / 8) / 4) ** (1 / 4)
    found = bleu(["the the the the the the the"], ["the cat sat near the mat now"])
    assert found == pytest.approx(100 * expected)


def test_marks_are_words_if_texts_are_tokenised():
    texts = ["one two three four, five"], ["one two three four , five"]
    assert bleu(*texts) < 100
    assert bleu(*texts, tokenize="13a") == pytest.approx(100)
    assert bleu(*texts, tokenize="intl") == pytest.approx(100)


def test_the_interval_is_that_of_resampled_sentences():
    right, wrong = ["a b c d"] * 50, ["a b c d"] * 25 + ["w x y z"] * 25
    interval = score_bleu(wrong, right)
    # Precisions of all orders are the share of right sentences.
    assert float(interval.estimate) == pytest.approx(50)
    error = 100 * math.sqrt(0.25 / 50)
    assert float(interval.low) == pytest.approx(50 - 1.96 * error, abs=4)
    assert float(interval.high) == pytest.approx(50 + 1.96 * error, abs=4)
    alike = score_bleu(right, right)
    assert float(alike.low) == pytest.approx(100)


@pytest.mark.parametrize("references", [[], ["a", "b"]])
def test_each_translation_needs_a_reference(references):
    with pytest.raises(ValueError, match=f"equally many, .*got 1 and {len(references)}"):
        bleu(["a"], references)
    with pytest.raises(ValueError, match="got 0 and 0"):
        bleu([], [])


def test_without_sacrebleu_it_is_named():
    with (
        mock.patch.dict(sys.modules, {"sacrebleu.metrics.bleu": None}),
        pytest.raises(ImportError, match=r"needs sacrebleu: pip install 'modscope\[translation\]'"),
    ):
        score_bleu(["a"], ["a"])
