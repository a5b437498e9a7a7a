"""Translation between two made-up grammars: from an English-like one to a verb-final one.

For attention between sequences (Tay et al. 2019, "CoDA", section 3.4, translates IWSLT'15): the
orders of words differ, words agree over a distance, and it is known which word comes from which.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice, product
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tasks.answers import score_sequence
from tasks.batch import Batch
from tasks.common import Key, require_choice, require_held_out, require_int, require_number
from tasks.stream_task import StreamTask

_NOUNS = (
    *("dog", "cat", "bird", "horse", "child", "friend", "doctor", "king", "teacher", "sailor"),
    *("table", "house", "river", "tree", "stone", "boat", "lamp", "book", "garden", "window"),
)
_IRREGULAR = {"child": "children"}
_ADJECTIVES = ("small", "old", "red", "quick", "quiet", "strange", "wise", "cold")
_ADVERBS = ("today", "often", "slowly", "again")
_VERBS = (
    *(("see", "sees", "saw"), ("find", "finds", "found"), ("know", "knows", "knew")),
    *(("hold", "holds", "held"), ("paint", "paints", "painted"), ("draw", "draws", "drew")),
    *(("move", "moves", "moved"), ("seek", "seeks", "sought"), ("lose", "loses", "lost")),
    *(("break", "breaks", "broke"), ("follow", "follows", "followed"), ("buy", "buys", "bought")),
)
"""Each with its forms: plural, singular and past."""
_N_CLASSES = 3
_MARKS = ("<pad>", "<bos>", "<eos>")
_PAD, _BOS, _EOS = range(3)
_MOST_SOURCE, _MOST_TARGET = 14, 18  # words of the longest sentence; the target's with <eos>


@dataclass(frozen=True, kw_only=True)
class TranslationConfig:
    """Settings of translation between grammars.

    Attributes:
        n_nouns: number of nouns, 3 to 20.
        n_verbs: number of verbs, 2 to 12.
        clauses: probability of a relative clause, 0 to 1.
        held_out: share of the pairs of verb and object that is held out for `ood`, rounded to a
            number of pairs; neither side may be empty.
        seed: seeds the pairs and every batch, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> config = TranslationConfig(n_nouns=5, n_verbs=4, held_out=0.2)
        >>> len(Translation(config).pairs("train")), len(Translation(config).pairs("ood"))
        (16, 4)
    """

    n_nouns: int = 20
    n_verbs: int = 12
    clauses: float = 0.3
    held_out: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("n_nouns", self.n_nouns, 3, len(_NOUNS))
        require_int("n_verbs", self.n_verbs, 2, len(_VERBS))
        require_number("clauses", self.clauses, 0, 1)
        require_number("held_out", self.held_out, 0, 1)
        n_pairs = self.n_nouns * self.n_verbs
        require_held_out("held_out", self.held_out, self.n_ood, n_pairs, "pairs of verb and object")
        require_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def n_ood(self) -> int:
        """Number of pairs of verb and object that are held out."""
        return round(self.held_out * self.n_nouns * self.n_verbs)


@dataclass(frozen=True, kw_only=True)
class _Sentence:
    """What a sentence says: words as numbers, None or 0 for what it does not have."""

    verb: int
    object: int
    subject: int
    subject_plural: int
    object_plural: int
    past: int
    negated: int
    clause: int
    subject_adjective: int | None
    object_adjective: int | None
    adverb: int | None
    clause_verb: int
    clause_object: int


class Translation(StreamTask[tuple[Tensor, Tensor]]):
    """Translation between two grammars.

    A sentence has a verb in the present or the past, a subject and an object, each with a number
    and perhaps an adjective; and perhaps a negation, an adverb and a relative clause:

        often the old dogs that saw the cat do not follow the small horse

    The source has the order adverb, subject, clause, verb, object; the verb, or `do`, agrees with
    the number of the subject. The target has the clause first and the verb last, adjectives after
    nouns, words of their own for number, role, tense and negation; and its verb has one of three
    forms, by the class of its object, which no word of the source shows.

    Splits: `train` and `id` have the same pairs of verb and object, `ood` the held-out ones, whose
    verb must take the form that it has with other objects of that class. In known pairs every verb
    is with every class, and so is every noun with a verb. Clauses have known pairs in all splits.

    A batch has (int64 ids, padded with 0) inputs: the source [batch, source_pos], ids in
    `source_words`; and, for teacher forcing, the begin token 1 and the target [batch, target_pos],
    ids in `target_words`; targets [batch, target_pos]: the target and the end token 2; mask
    [batch, target_pos]: True for both; and the latents (int64)
    `alignment` [batch, target_pos]: the position in the source that a target word comes from, -1
    for the end token and padding;
    `verb`, `object`, `subject` [batch]: numbers of words; `subject_plural`, `object_plural`,
    `past`, `negated`, `clause` [batch]: 0 or 1;
    `length` [batch]: number of words of the target.

    Raises:
        ValueError: too many pairs are to be held out.

    Example:
        >>> Translation(TranslationConfig()).batch("ood", 0, 100)
    """

    SPLITS: ClassVar = ("train", "id", "ood")

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__(key=Key(config))
        self.config = config
        self._known, self._held_out = self._split_pairs()

    def pairs(self, split: str) -> Int[np.ndarray, "pair 2"]:
        """The pairs of verb and object of a split.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.SPLITS)
        return self._held_out if split == "ood" else self._known

    @cached_property
    def source_words(self) -> tuple[str, ...]:
        """The words of the source; a token's id is its index."""
        nouns = _NOUNS[: self.config.n_nouns]
        verbs = [form for forms in _VERBS[: self.config.n_verbs] for form in forms]
        others = ("the", "that", "not", "do", "does", "did", *_ADJECTIVES, *_ADVERBS)
        return (*_MARKS, *others, *nouns, *map(_plural, nouns), *verbs)

    @cached_property
    def target_words(self) -> tuple[str, ...]:
        """The words of the target; a token's id is its index."""
        lexicon = self._lexicon
        return (*_MARKS, *(word for words in lexicon.values() for word in words))

    @cached_property
    def _lexicon(self) -> dict[str, Sequence[str]]:
        """The target's words by kind; those of a verb are its forms for each class of objects."""
        words = _made_up_words()
        sizes = {
            "particle": 6,  # plural, subject, object, past, negation, relative
            "adjective": len(_ADJECTIVES),
            "adverb": len(_ADVERBS),
            "noun": self.config.n_nouns,
            "stem": self.config.n_verbs,
        }
        lexicon: dict[str, Sequence[str]] = {
            kind: list(islice(words, size)) for kind, size in sizes.items()
        }
        endings = ("k", "s", "n")[:_N_CLASSES]
        lexicon["verb"] = [stem + ending for stem in lexicon.pop("stem") for ending in endings]
        return lexicon

    def _split_pairs(self) -> tuple[Int[np.ndarray, "pair 2"], Int[np.ndarray, "pair 2"]]:
        config = self.config
        every = np.array(list(product(range(config.n_verbs), range(config.n_nouns))))
        is_known = np.ones(len(every), bool)
        for number in self._key.generator("/pairs").permutation(len(every)):
            verb, noun = every[number]
            is_known[number] = False
            known = every[is_known]
            classes = known[known[:, 0] == verb, 1] % _N_CLASSES
            if noun % _N_CLASSES not in classes or noun not in known[:, 1]:
                is_known[number] = True
            if (~is_known).sum() == config.n_ood:
                return every[is_known], every[~is_known]
        raise ValueError(
            f"held_out must leave every verb an object of each class and every noun a verb, got "
            f"{config.held_out!r}: {config.n_ood} pairs, of which {(~is_known).sum()} can be"
        )

    def _draw(
        self, split: str, size: int, generator: np.random.Generator
    ) -> Batch[tuple[Tensor, Tensor]]:
        config = self.config

        def pairs(of: str) -> list[list[int]]:
            known = self.pairs(of)
            return known[generator.integers(len(known), size=size)].tolist()

        def perhaps(n: int) -> list[int | None]:
            """One of n words half of the time, else none."""
            is_there = generator.integers(2, size=size).tolist()
            words = generator.integers(n, size=size).tolist()
            return [word if there else None for there, word in zip(is_there, words, strict=True)]

        flags = generator.integers(2, size=(size, 4)).tolist()
        columns = zip(
            pairs(split),
            pairs("train"),
            generator.integers(config.n_nouns, size=size).tolist(),
            (generator.random(size) < config.clauses).tolist(),
            flags,
            perhaps(len(_ADJECTIVES)),
            perhaps(len(_ADJECTIVES)),
            perhaps(len(_ADVERBS)),
            strict=True,
        )
        return self._encoded(
            [
                _Sentence(
                    verb=main[0],
                    object=main[1],
                    subject=subject,
                    subject_plural=flag[0],
                    object_plural=flag[1],
                    past=flag[2],
                    negated=flag[3],
                    clause=int(clause),
                    subject_adjective=adjectives[0],
                    object_adjective=adjectives[1],
                    adverb=adverb,
                    clause_verb=of_clause[0],
                    clause_object=of_clause[1],
                )
                for main, of_clause, subject, clause, flag, *adjectives, adverb in columns
            ]
        )

    def _encoded(self, sentences: list[_Sentence]) -> Batch[tuple[Tensor, Tensor]]:
        source = torch.zeros(len(sentences), _MOST_SOURCE, dtype=torch.int64)
        targets = torch.zeros(len(sentences), _MOST_TARGET, dtype=torch.int64)
        alignment = torch.full_like(targets, -1)
        lengths = []
        for row, sentence in enumerate(sentences):
            words = self._write(sentence)
            places = {part: place for place, (part, _) in enumerate(words)}
            source[row, : len(words)] = torch.tensor([self._source_ids[word] for _, word in words])
            translated = self._translate(sentence)
            ids = [self._target_ids[word] for _, word in translated]
            targets[row, : len(ids) + 1] = torch.tensor([*ids, _EOS])
            alignment[row, : len(ids)] = torch.tensor([places[part] for part, _ in translated])
            lengths.append(len(ids))
        shifted = targets.masked_fill(targets == _EOS, _PAD).roll(1, 1)
        shifted[:, 0] = _BOS
        names = ("verb", "object", "subject", "subject_plural", "object_plural")
        names = (*names, "past", "negated", "clause")
        known = [asdict(sentence) for sentence in sentences]
        latents = {name: torch.tensor([one[name] for one in known]) for name in names}
        return Batch(
            inputs=(source, shifted),
            targets=targets,
            mask=targets != _PAD,
            latents={"alignment": alignment, **latents, "length": torch.tensor(lengths)},
        )

    @cached_property
    def _source_ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.source_words)}

    @cached_property
    def _target_ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.target_words)}

    def _write(self, one: _Sentence) -> list[tuple[str, str]]:
        """The parts of the source and their words."""
        subject, object_ = _NOUNS[one.subject], _NOUNS[one.object]
        form = 2 if one.past else 1 - one.subject_plural
        words = [
            ("adverb", "" if one.adverb is None else _ADVERBS[one.adverb]),
            ("the", "the"),
            ("subject adjective", _adjective(one.subject_adjective)),
            ("subject", _plural(subject) if one.subject_plural else subject),
        ]
        if one.clause:
            words += [
                ("that", "that"),
                ("clause verb", _VERBS[one.clause_verb][2]),
                ("clause the", "the"),
                ("clause object", _NOUNS[one.clause_object]),
            ]
        if one.negated:
            words += [("do", ("do", "does", "did")[form]), ("not", "not")]
            form = 0
        words += [
            ("verb", _VERBS[one.verb][form]),
            ("object the", "the"),
            ("object adjective", _adjective(one.object_adjective)),
            ("object", _plural(object_) if one.object_plural else object_),
        ]
        return [(part, word) for part, word in words if word]

    def _translate(self, one: _Sentence) -> list[tuple[str, str]]:
        """The words of the target, each after the part of the source that it comes from."""
        lexicon = self._lexicon
        plural, of_subject, of_object, past, negation, relative = lexicon["particle"]

        def verb(number: int, noun: int) -> str:
            return lexicon["verb"][number * _N_CLASSES + noun % _N_CLASSES]

        def noun(
            part: str, number: int, adjective: int | None, is_plural: int, role: str
        ) -> Iterator[tuple[str, str]]:
            yield part, lexicon["noun"][number]
            if adjective is not None:
                yield f"{part} adjective", lexicon["adjective"][adjective]
            if is_plural:
                yield part, plural
            yield part, role

        words = []
        if one.clause:
            words += [
                *noun("clause object", one.clause_object, None, 0, of_object),
                ("clause verb", verb(one.clause_verb, one.clause_object)),
                ("clause verb", past),
                ("that", relative),
            ]
        words += noun("subject", one.subject, one.subject_adjective, one.subject_plural, of_subject)
        if one.adverb is not None:
            words.append(("adverb", lexicon["adverb"][one.adverb]))
        words += noun("object", one.object, one.object_adjective, one.object_plural, of_object)
        words.append(("verb", verb(one.verb, one.object)))
        if one.past:
            words.append(("do" if one.negated else "verb", past))
        if one.negated:
            words.append(("not", negation))
        return words

    def words(
        self, batch: Batch[tuple[Tensor, Tensor]], example: int
    ) -> tuple[list[str], list[str]]:
        """Return the target and the source of one example as lists of words, "" for padding.

        They label the queries and the keys of attention from the target to the source. `<eos>`
        ends the target.
        """
        target, source = (
            ["" if token == _PAD else words[token] for token in ids[example].tolist()]
            for ids, words in (
                (batch.targets, self.target_words),
                (batch.inputs[0], self.source_words),
            )
        )
        return target, source

    def decode(self, ids: Int[Tensor, " pos"]) -> str:
        """Return the words of the target before the first `<eos>`, with spaces.

        Args:
            ids: of `target_words`; `<pad>` and `<bos>` are skipped.
        """
        tokens = ids.tolist()
        end = tokens.index(_EOS) if _EOS in tokens else len(tokens)
        return " ".join(self.target_words[token] for token in tokens[:end] if token > _EOS)

    score = staticmethod(score_sequence)


def _adjective(number: int | None) -> str:
    return "" if number is None else _ADJECTIVES[number]


def _plural(noun: str) -> str:
    return _IRREGULAR.get(noun, f"{noun}s")


def _made_up_words() -> Iterator[str]:
    """Words of two syllables, each another one."""
    syllables = [first + second for first, second in product("ktmrbd", "aiou")]
    for first, second in zip(np.repeat(syllables, 24), np.tile(syllables, 24), strict=True):
        yield f"{first}{second}"
