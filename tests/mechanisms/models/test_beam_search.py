"""Beam search: compared with all sequences, and with greedy decoding."""

from itertools import product

import pytest
import torch

from mechanisms import beam_search

BEGIN, END, PADDING = 4, 2, -1
N_TOKENS = 4


def table(seed, n_rows=3):
    """A model of the next token: random logits for each row and each prefix."""

    def logits(row, prefix):
        key = seed * 10**6 + int(row) * 10**5 + hash(tuple(prefix)) % 10**5
        return 2 * torch.randn(N_TOKENS, generator=torch.Generator().manual_seed(key))

    def next_token(rows, prefixes):
        assert (prefixes[:, 0] == BEGIN).all()
        assert not (prefixes == END).any()
        pairs = zip(rows.tolist(), prefixes.tolist(), strict=True)
        return torch.stack([logits(row, prefix) for row, prefix in pairs])

    return logits, next_token


def search(next_token, n_rows=3, **changes):
    settings = {"begin": BEGIN, "end": END, "padding": PADDING, "max_length": 4} | changes
    return beam_search(next_token, n_rows, **settings)


def all_sequences(logits, row, max_length, penalty):
    """Every sequence that has ended or is cut off, with its score, best first."""
    found = {}
    for tokens in product(range(N_TOKENS), repeat=max_length):
        if END in tokens:
            tokens = tokens[: tokens.index(END) + 1]
        log_prob = sum(
            float(logits(row, [BEGIN, *tokens[:position]]).log_softmax(-1)[token])
            for position, token in enumerate(tokens)
        )
        found[tokens] = log_prob / ((5 + len(tokens)) / 6) ** penalty
    return sorted(found.items(), key=lambda pair: -pair[1])


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_for_all_prefixes_finds_the_best_sequences(seed, penalty):
    logits, next_token = table(seed)
    tokens, scores = search(next_token, width=100, length_penalty=penalty)
    assert tokens.shape == (3, 100, 4)
    for row in range(3):
        expected = all_sequences(logits, row, 4, penalty)
        # The last of many are not worth a comparison: each has the place of its score.
        for rank, (sequence, score) in enumerate(expected[:20]):
            padded = [*sequence, *[PADDING] * (4 - len(sequence))]
            assert tokens[row, rank].tolist() == padded
            assert scores[row, rank].item() == pytest.approx(score, rel=1e-5)


def test_there_are_no_more_sequences_than_there_are():
    _, next_token = table(0)
    tokens, scores = search(next_token, width=40, max_length=2)
    # Each of three tokens and then one of four, or the end at once.
    assert scores.isfinite().sum(1).tolist() == [13] * 3
    for row in range(3):
        found = [tuple(one) for one in tokens[row, :13].tolist()]
        assert len(set(found)) == 13
    assert (scores[:, :-1] >= scores[:, 1:]).all()


@pytest.mark.parametrize("seed", range(4))
def test_width_1_takes_the_most_probable_token_each_time(seed):
    logits, next_token = table(seed)
    tokens, scores = search(next_token, width=1, max_length=6)
    for row in range(3):
        prefix, log_prob = [BEGIN], 0.0
        while len(prefix) <= 6 and prefix[-1] != END:
            found = logits(row, prefix).log_softmax(-1)
            log_prob += found.max().item()
            prefix.append(int(found.argmax()))
        n_tokens = len(prefix) - 1
        assert tokens[row, 0].tolist() == prefix[1:] + [PADDING] * (6 - n_tokens)
        assert scores[row, 0].item() == pytest.approx(log_prob / ((5 + n_tokens) / 6) ** 0.6)


def test_a_wider_beam_escapes_a_trap():
    """Token 0 is likelier at first, but everything after it is improbable."""

    def next_token(rows, prefixes):
        logits = torch.zeros(len(prefixes), N_TOKENS)
        for number, prefix in enumerate(prefixes.tolist()):
            if prefix == [BEGIN]:
                logits[number] = torch.tensor([0.6, 0.4, 1e-9, 1e-9]).log()
            elif prefix[1] == 1:
                logits[number] = torch.tensor([1e-9, 1e-9, 1.0, 1e-9]).log()
        return logits

    greedy, wide = (search(next_token, 1, width=width)[0][0, 0].tolist() for width in (1, 2))
    assert greedy[0] == 0
    assert wide == [1, END, PADDING, PADDING]


def test_longer_sequences_are_preferred_with_a_greater_penalty():
    def next_token(rows, prefixes):
        ends = torch.tensor([0.49, 0.0, 0.51, 0.0] if prefixes.shape[1] == 1 else [0, 0, 1.0, 0])
        return ends.log().expand(len(prefixes), -1)

    short, long = (
        search(next_token, 1, width=3, length_penalty=penalty)[0][0, 0].tolist()
        for penalty in (0.0, 1.0)
    )
    assert short == [END, PADDING, PADDING, PADDING]
    assert long == [0, END, PADDING, PADDING]


def test_the_model_is_not_asked_beyond_the_end():
    calls = []

    def next_token(rows, prefixes):
        calls.append(rows.tolist())
        logits = torch.full((len(rows), N_TOKENS), -100.0)
        logits[:, 0] = 0
        is_last = (rows == 0) | (prefixes.shape[1] == 3)
        logits[is_last] = torch.tensor([-100.0, -100, 0, -100])
        return logits

    tokens, _ = search(next_token, 2, width=1, max_length=9)
    assert tokens[:, 0, :3].tolist() == [[END, PADDING, PADDING], [0, 0, END]]
    assert calls == [[0, 1], [1], [1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"length_penalty": -1}, "length_penalty must be at least 0, got -1"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        search(table(0)[1], **changes)
