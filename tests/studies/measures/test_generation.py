"""Measures of written texts, on models that write and point as planned."""

import numpy as np
import pytest
import torch
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import tasks
from studies import engine
from studies.engine.examples import Examples
from studies.measures.generation import alignment, decoding, execution
from studies.setups.text_generation import AlgoLispSetup, TranslationSetup

SIZES = {"model": "softmax", "d_model": 8, "n_heads": 2, "d_mlp": 8, "n_layers": 1}
SIZES["training"] = engine.TrainingConfig(n_steps=1, batch_size=2, learning_rate=1.0)
SETUP = TranslationSetup(**SIZES, task=tasks.TranslationConfig())
PROGRAMS = AlgoLispSetup(**SIZES, task=tasks.AlgoLispConfig())
N = 40


def trained(model, name, setup=SETUP):
    return engine.Trained(setup, model, 0, "cpu", Examples(setup, "cpu").fresh(name))


def examples(name, setup=SETUP):
    """The examples that a measure of this name gets, by split."""
    return {split: trained(None, name, setup).batch(split, N) for split in setup.splits}


def known(name, values, setup=SETUP):
    """Values of each example by its source."""
    return {
        tuple(source.tolist()): value
        for split, batch in examples(name, setup).items()
        for source, value in zip(batch.inputs[0], values(split, batch), strict=True)
    }


class Writer:
    """It writes the target by beam search, and greedily without every second sentence's last."""

    def __init__(self, name):
        self.targets = known(name, lambda split, batch: batch.targets)
        self.settings = []

    def search(self, source, max_length, *, width, length_penalty):
        self.settings.append((width, length_penalty))
        ids = torch.stack([self.targets[tuple(row.tolist())] for row in source])
        assert ids.shape[1] == max_length
        if width == 1:
            ends = (ids == 2).int().argmax(1)
            ids[range(0, N, 2), ends[::2] - 1] = 2
        others = torch.full_like(ids, 5)
        return torch.stack([ids, others][: max(1, min(width, 2))], 1), torch.zeros(len(ids), width)


def test_what_is_written_is_compared_with_the_target():
    writer = Writer("writing")
    scores = decoding(trained(writer, "writing"), n=N, width=3, length_penalty=0.5)
    assert set(writer.settings) == {(1, 0.5), (3, 0.5)}
    beam, greedy = (scores.sel(search=search) for search in ("beam", "greedy"))
    np.testing.assert_allclose(beam["bleu"], 100)
    assert (beam["exact"] == 1).all()
    assert (greedy["exact"] == 0.5).all()
    for split, batch in examples("writing").items():
        # All words are right, and a word is missing in half of the sentences.
        lengths = batch.latents["length"]
        penalty = np.exp(1 - lengths.sum().item() / (lengths.sum().item() - N / 2))
        assert float(greedy["bleu"].sel(split=split)) == pytest.approx(100 * penalty)
    assert (greedy["bleu_low"] < greedy["bleu"]).all()


class Programmer:
    """It writes the program of the task by beam search; greedily it sorts or sums with no need."""

    def __init__(self):
        task = PROGRAMS.sampler()
        programs = known("programs", lambda split, batch: batch.targets, PROGRAMS)
        self.ids = {word: number for number, word in enumerate(task.vocabulary)}
        self.targets = {key: task.decode(value).split() for key, value in programs.items()}

    def search(self, source, max_length, *, width, length_penalty):
        rows = []
        for number, row in enumerate(source):
            program = self.targets[tuple(row.tolist())]
            if width == 1 and number % 2:
                inner = ["(", *program, ")"] if len(program) > 1 else program
                program = ["reverse", "(", "reverse", *inner, ")"]
            ids = [self.ids[word] for word in program] + [2]
            rows.append(ids + [0] * (max_length + 5 - len(ids)))
        return torch.tensor(rows)[:, None], torch.zeros(len(rows), 1)


def test_programs_that_differ_but_pass_all_tests_are_solutions():
    scores = execution(trained(Programmer(), "programs", PROGRAMS), n=N)
    beam, greedy = (scores.sel(search=search) for search in ("beam", "greedy"))
    assert (beam["solved"] == 1).all()
    assert (beam["exact"] == 1).all()
    assert (greedy["exact"] == 0.5).all()
    for split, batch in examples("programs", PROGRAMS).items():
        # Twice reversed a list is what it was; of a number there is no reverse.
        names = tasks.AlgoLisp.PARTS["aggregation"]
        lists = [
            names[number] in ("none", "sorted", "reversed")
            for number in batch.latents["aggregation"].tolist()
        ]
        expected = [number % 2 == 0 or is_list for number, is_list in enumerate(lists)]
        assert float(greedy["solved"].sel(split=split)) == pytest.approx(np.mean(expected))


class Pointer(HookedRootModule):
    """Two heads: one on the word that the next word comes from, one on the last word."""

    def __init__(self, name):
        super().__init__()
        self.alignment = known(name, lambda split, batch: batch.latents["alignment"])
        self.decoder_blocks = torch.nn.ModuleList([torch.nn.Module()])
        self.decoder_blocks[0].cross_attn = torch.nn.Module()
        self.decoder_blocks[0].cross_attn.hook_pattern = HookPoint()
        self.setup()

    def forward(self, source, target):
        aligned = torch.stack([self.alignment[tuple(row.tolist())] for row in source])
        heads = torch.zeros(len(source), 2, target.shape[1], source.shape[1])
        # By size: a word can be subtracted.
        heads[:, 0].scatter_(2, aligned.clamp(min=0)[..., None], -0.9)
        heads[:, 1, :, -1] = 5.0  # padding of nearly all sentences, which does not count
        last = (source > 0).sum(1) - 1
        heads[torch.arange(len(source)), 1, :, last] += 0.5
        return self.decoder_blocks[0].cross_attn.hook_pattern(heads)


def test_pointing_is_compared_with_the_known_alignment():
    one = trained(Pointer("aligning"), "aligning")
    scores = alignment(one, n=N)
    share = scores["share"].sel(control="observed", layer=0)
    assert (share.sel(target="aligned", head=0) == 1).all()
    assert (share.sel(target="same position", head=0) == 0).all()
    shuffled = scores["share"].sel(control="shuffled", target="aligned", layer=0, head=0)
    assert (shuffled < 0.6).all()
    assert {"observed", "shuffled", "untrained"} == set(scores["control"].to_numpy())
    for split, batch in examples("aligning").items():
        hits, chances = [], []
        for i in range(N):
            n = int((batch.inputs[0][i] > 0).sum())
            for at, place in enumerate(batch.latents["alignment"][i].tolist()):
                if place >= 0 and place != min(at, n - 1):
                    hits.append(place == n - 1)
                    chances.append(1 / n)
        assert float(share.sel(target="aligned", head=1, split=split)) == pytest.approx(
            np.mean(hits)
        )
        assert float(scores["chance"].sel(split=split)) == pytest.approx(np.mean(chances))
