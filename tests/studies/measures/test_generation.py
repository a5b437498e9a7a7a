"""Measures of written texts, on models that write and point as planned."""

import numpy as np
import pytest
import torch
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import tasks
from studies import engine
from studies.engine.examples import Examples
from studies.measures.generation import alignment, decoding
from studies.setups.text_generation import TranslationSetup

SETUP = TranslationSetup(
    model="softmax",
    d_model=8,
    n_heads=2,
    d_mlp=8,
    n_layers=1,
    task=tasks.TranslationConfig(),
    training=engine.TrainingConfig(n_steps=1, batch_size=2, learning_rate=1.0),
)
N = 40


def trained(model, name):
    return engine.Trained(SETUP, model, 0, "cpu", Examples(SETUP, "cpu").fresh(name))


def examples(name):
    """The examples that a measure of this name gets, by split."""
    return {split: trained(None, name).batch(split, N) for split in SETUP.splits}


def known(name, values):
    """Values of each example by its source."""
    return {
        tuple(source.tolist()): value
        for split, batch in examples(name).items()
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
