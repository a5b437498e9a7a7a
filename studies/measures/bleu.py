"""BLEU of translations, by sacrebleu, with its interval over sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

import probes

Tokenize = Literal["none", "13a", "intl"]


def score_bleu(
    translations: Sequence[str],
    references: Sequence[str],
    *,
    tokenize: Tokenize = "none",
    resamples: int = 1000,
    seed: int = 0,
) -> probes.Interval:
    """BLEU of a set of translations, from 0 to 100, with its bootstrap 95% interval.

    Matches of up to four words are counted over all sentences together, so that it is no mean over
    sentences.

    Args:
        translations: one text for each sentence.
        references: the right translation of each.
        tokenize: how texts become words: at white space (`none`, for texts that are tokenised), as
            mteval-v13a does (`13a`), or with its international tokenisation (`intl`, that of
            tensor2tensor's `t2t-bleu`).
        resamples: number of resamples of sentences.
        seed: seed of the resamples.

    Raises:
        ImportError: sacrebleu is not installed.
        ValueError: there are no sentences, or not as many references.

    Source:
        Papineni et al. 2002, "BLEU"; Post 2018, "A call for clarity in reporting BLEU scores".

    Example:
        >>> float(score_bleu(["the cat sat down"], ["the cat sat down"]).estimate)
        100.0
    """
    # Imported here, since most studies need no BLEU.
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise ImportError("BLEU needs sacrebleu: pip install 'modscope[translation]'") from error

    if not translations or len(translations) != len(references):
        raise ValueError(
            f"translations and references must be equally many, and at least one, got "
            f"{len(translations)} and {len(references)}"
        )
    # With the effective order, since the others are undefined in short sentences.
    scorer = BLEU(tokenize=tokenize, force=True, effective_order=True)
    scores = [
        scorer.sentence_score(translation, [reference])
        for translation, reference in zip(translations, references, strict=True)
    ]
    counts = np.array([(*one.counts, *one.totals, one.sys_len, one.ref_len) for one in scores])

    def bleu(weights: np.ndarray) -> np.ndarray:
        sums = np.rint(weights @ counts).astype(int).tolist()
        return np.array(
            [
                BLEU.compute_bleu(row[:4], row[4:8], row[8], row[9], smooth_method="exp").score
                for row in sums
            ]
        )

    return probes.bootstrap(bleu, (len(scores),), resamples=resamples, seed=seed)
