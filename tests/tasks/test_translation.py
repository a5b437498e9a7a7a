"""Translation between grammars: compared with a translator that reads the source's words."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from tasks.translation import Translation, TranslationConfig

CONTRACT_EXAMPLES = {"": lambda folder: Translation(TranslationConfig())}

ADJECTIVES = {"small", "old", "red", "quick", "quiet", "strange", "wise", "cold"}
ADVERBS = {"today", "often", "slowly", "again"}


def read(words):
    """Read a sentence of the source: what each part is, and the places of its words."""
    place = {}
    rest = list(enumerate(words))
    if rest[0][1] in ADVERBS:
        place["adverb"] = rest.pop(0)
    assert rest.pop(0)[1] == "the"
    if rest[0][1] in ADJECTIVES:
        place["adjective"] = rest.pop(0)
    place["subject"] = rest.pop(0)
    if rest[0][1] == "that":
        place["that"], place["clause verb"] = rest.pop(0), rest.pop(0)
        assert rest.pop(0)[1] == "the"
        place["clause object"] = rest.pop(0)
    if rest[0][1] in ("do", "does", "did"):
        place["do"], place["not"] = rest.pop(0), rest.pop(0)
        assert place["not"][1] == "not"
    place["verb"] = rest.pop(0)
    assert rest.pop(0)[1] == "the"
    if rest[0][1] in ADJECTIVES:
        place["object adjective"] = rest.pop(0)
    place["object"] = rest.pop(0)
    assert not rest
    return place


def number_of(noun, task):
    nouns = task.source_words[21 : 21 + task.config.n_nouns]
    singular = {"children": "child"}.get(noun, noun.removesuffix("s"))
    return nouns.index(singular), noun != singular


def verb_of(verb, task):
    forms = task.source_words[21 + 2 * task.config.n_nouns :]
    return divmod(forms.index(verb), 3)


@pytest.mark.parametrize("split", Translation.SPLITS)
@pytest.mark.parametrize("changes", [{}, {"n_nouns": 7, "n_verbs": 3, "clauses": 1.0, "seed": 2}])
def test_targets_are_translations_of_sources(changes, split):
    task = Translation(TranslationConfig(**changes))
    n_nouns, n_verbs = task.config.n_nouns, task.config.n_verbs
    words = task.target_words[3:]
    plural, of_subject, of_object, past, negation, relative = words[:6]
    adjectives = dict(zip(task.source_words[9:17], words[6:14], strict=True))
    adverbs = dict(zip(task.source_words[17:21], words[14:18], strict=True))
    nouns, verbs = words[18 : 18 + n_nouns], words[18 + n_nouns :]
    assert len(verbs) == 3 * n_verbs

    def phrase(noun, adjective, role):
        number, is_plural = number_of(noun[1], task)
        yield nouns[number], noun[0]
        if adjective:
            yield adjectives[adjective[1]], adjective[0]
        if is_plural:
            yield plural, noun[0]
        yield role, noun[0]

    def form(verb, noun):
        return verbs[3 * verb_of(verb[1], task)[0] + number_of(noun[1], task)[0] % 3], verb[0]

    batch = task.batch(split, 3, 200)
    for i in range(200):
        target, source = task.words(batch, i)
        part: Any = read([word for word in source if word])
        expected = []
        if "that" in part:
            expected += phrase(part["clause object"], None, of_object)
            expected += [form(part["clause verb"], part["clause object"])]
            expected += [(past, part["clause verb"][0]), (relative, part["that"][0])]
        expected += phrase(part["subject"], part.get("adjective"), of_subject)
        if "adverb" in part:
            expected += [(adverbs[part["adverb"][1]], part["adverb"][0])]
        expected += phrase(part["object"], part.get("object adjective"), of_object)
        expected += [form(part["verb"], part["object"])]
        if part.get("do", part["verb"])[1] == "did" or verb_of(part["verb"][1], task)[1] == 2:
            expected += [(past, part.get("do", part["verb"])[0])]
        if "not" in part:
            expected += [(negation, part["not"][0])]
        length = len(expected)
        assert target[: length + 1] == [*(word for word, _ in expected), "<eos>"]
        assert set(target[length + 1 :]) <= {""}
        alignment = batch.latents["alignment"][i].tolist()
        assert alignment == [place for _, place in expected] + [-1] * (len(target) - length)
        assert batch.latents["length"][i] == length
        assert task.decode(batch.targets[i]) == " ".join(word for word, _ in expected)
        # Latents and agreement.
        known = {name: int(values[i]) for name, values in batch.latents.items() if values.ndim == 1}
        assert (known["subject"], known["subject_plural"]) == number_of(part["subject"][1], task)
        assert (known["object"], known["object_plural"]) == number_of(part["object"][1], task)
        verb, shape = verb_of(part["verb"][1], task)
        assert known["verb"] == verb
        finite = part["do"][1] if "do" in part else ("do", "does", "did")[shape]
        assert finite == ("did" if known["past"] else ("does", "do")[known["subject_plural"]])
        assert shape == 0 or "do" not in part
        assert (known["negated"], known["clause"]) == ("not" in part, "that" in part)


def test_batches_have_the_shapes_of_teacher_forcing():
    task = Translation(TranslationConfig(clauses=1.0))
    batch = task.batch("train", 0, 3000)
    source, given = batch.inputs
    assert (source.dtype, given.dtype, batch.targets.dtype) == (torch.int64,) * 3
    # No column is never used.
    assert (source.shape[1], batch.targets.shape[1]) == (14, 18)
    assert (source > 0).any(0).all()
    assert batch.mask.any(0).all()
    assert torch.equal(batch.mask, batch.targets > 0)
    assert (given[:, 0] == 1).all()
    for row, length in enumerate(batch.latents["length"].tolist()):
        assert torch.equal(given[row, 1 : length + 1], batch.targets[row, :length])
        assert batch.targets[row, length] == 2
        assert not given[row, length + 1 :].any()
    for words, ids in ((task.source_words, source), (task.target_words, batch.targets)):
        assert len(set(words)) == len(words)
        assert ids.max() == len(words) - 1


@pytest.mark.parametrize("held_out", [0.1, 0.5])
def test_pairs_of_verb_and_object_are_held_out(held_out):
    task = Translation(TranslationConfig(held_out=held_out))
    pairs = {split: set(map(tuple, task.pairs(split).tolist())) for split in task.splits}
    assert pairs["train"] == pairs["id"]
    assert not pairs["train"] & pairs["ood"]
    assert len(pairs["train"] | pairs["ood"]) == 12 * 20
    assert len(pairs["ood"]) == round(held_out * 240)
    for split in task.splits:
        latents = task.batch(split, 0, 3000).latents
        found = Counter(zip(latents["verb"].tolist(), latents["object"].tolist(), strict=True))
        assert set(found) == pairs[split]
    for verb in range(12):
        assert {noun % 3 for other, noun in pairs["train"] if other == verb} == {0, 1, 2}
    assert {noun for _, noun in pairs["train"]} == set(range(20))
    assert not np.array_equal(
        task.pairs("ood"), Translation(TranslationConfig(held_out=held_out, seed=1)).pairs("ood")
    )


def test_clauses_have_known_pairs():
    task = Translation(TranslationConfig(clauses=1.0, held_out=0.5))
    known = set(map(tuple, task.pairs("train").tolist()))
    batch = task.batch("ood", 0, 500)
    for i in range(500):
        part = read([word for word in task.words(batch, i)[1] if word])
        verb, _ = verb_of(part["clause verb"][1], task)
        assert (verb, number_of(part["clause object"][1], task)[0]) in known


def test_parts_are_there_as_often_as_they_should():
    task = Translation(TranslationConfig())
    latents = task.batch("id", 0, 8000).latents
    for name in ("subject_plural", "object_plural", "past", "negated"):
        assert latents[name].float().mean() == pytest.approx(0.5, abs=0.03)
    assert latents["clause"].float().mean() == pytest.approx(0.3, abs=0.03)
    counts = latents["verb"].bincount()
    assert counts.min() > 0.5 * counts.max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_nouns": 2}, "n_nouns must be an integer from 3 to 20, got 2"),
        ({"n_nouns": 21}, "n_nouns must be .*, got 21"),
        ({"n_verbs": 1}, "n_verbs must be an integer from 2 to 12, got 1"),
        ({"clauses": 1.5}, "clauses must be a number from 0 to 1, got 1.5"),
        ({"held_out": 0.0}, "held_out must leave .*"),
        ({"held_out": True}, "held_out must be .*, got True"),
        ({"seed": -1}, "seed must be .*, got -1"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TranslationConfig(**changes)


def test_every_noun_is_an_object_in_training():
    # Two verbs need six of the pairs; each of the twenty nouns needs one.
    task = Translation(TranslationConfig(n_verbs=2, held_out=0.5))
    assert set(task.pairs("train")[:, 1].tolist()) == set(range(20))


def test_too_many_pairs_cannot_be_held_out():
    message = (
        "held_out must leave every verb an object of each class .*got 0.9: 216 pairs, of which"
    )
    with pytest.raises(ValueError, match=message):
        Translation(TranslationConfig(held_out=0.9))
