"""The grammar of SCAN: all commands and their actions (Lake & Baroni 2018)."""

from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

SCAN_LATENTS = {
    "verb": ("walk", "look", "run", "jump", "turn"),
    "direction": ("none", "left", "right"),
    "manner": ("none", "opposite", "around"),
    "conjunction": ("none", "and", "after"),
}
"""The name of each id of the latents."""

SCAN_WORDS = (
    "<pad>",
    *("walk", "look", "run", "jump", "turn"),
    *("left", "right", "opposite", "around", "twice", "thrice", "and", "after"),
)
"""The tokens of commands; a token's id is its index."""

SCAN_ACTIONS = (
    *("<pad>", "<bos>", "<eos>"),
    *("I_WALK", "I_LOOK", "I_RUN", "I_JUMP", "I_TURN_LEFT", "I_TURN_RIGHT"),
)
"""The tokens of answers; a token's id is its index."""

PAD, BOS, EOS = range(3)
"""The ids of padding, and of the beginning and the end of an answer."""


class Commands(NamedTuple):
    """All 20,910 commands of the grammar; -1 stands for a second phrase that is absent."""

    words: Int[np.ndarray, "command 9"]
    actions: Int[np.ndarray, "command 48"]
    length: Int[np.ndarray, " command"]
    conjunction: Int[np.ndarray, " command"]
    verb: Int[np.ndarray, "command 2"]
    direction: Int[np.ndarray, "command 2"]
    manner: Int[np.ndarray, "command 2"]
    times: Int[np.ndarray, "command 2"]


@cache
def all_commands() -> Commands:
    """Return all commands, those of one phrase first."""
    # All phrases, each once, twice and thrice. Only phrases with a direction have a manner.
    described = ("verb", "direction", "manner")
    shape = [len(SCAN_LATENTS[name]) for name in described]
    phrases = np.indices((*shape, 3)).reshape(4, -1)
    phrases[3] += 1
    verb, direction, manner, _ = phrases
    is_turn = verb == SCAN_LATENTS["verb"].index("turn")
    phrases = phrases[:, (direction > 0) | ((manner == 0) & ~is_turn)]
    verb, direction, manner, times = phrases

    words = np.stack(
        [
            _ids(SCAN_WORDS, *SCAN_LATENTS["verb"])[verb],
            _ids(SCAN_WORDS, *SCAN_LATENTS["manner"])[manner],
            _ids(SCAN_WORDS, *SCAN_LATENTS["direction"])[direction],
            _ids(SCAN_WORDS, "once", "twice", "thrice")[times - 1],
        ],
        -1,
    )
    act = _ids(SCAN_ACTIONS, "I_WALK", "I_LOOK", "I_RUN", "I_JUMP", "none")[verb]
    turn = _ids(SCAN_ACTIONS, "none", "I_TURN_LEFT", "I_TURN_RIGHT")[direction]
    padding = np.full_like(turn, PAD)
    no_manner = [turn, act, *[padding] * 6]
    opposite = [turn, turn, act, *[padding] * 5]
    around = [turn, act] * 4
    once = np.array([no_manner, opposite, around])[manner, :, np.arange(len(turn))]
    actions = np.tile(once, 3) * (np.arange(24) // 8 < times[:, None])

    # A command is one phrase, or two phrases with a conjunction.
    n = len(turn)
    single, pair = np.arange(n), np.divmod(np.arange(n * n), n)
    first, second = (np.concatenate([single, phrase, phrase]) for phrase in pair)
    conjunction = np.repeat([0, 1, 2], [n, n * n, n * n])
    is_pair, is_after = (conjunction > 0)[:, None], (conjunction == 2)[:, None]
    command_words = [
        words[first],
        _ids(SCAN_WORDS, *SCAN_LATENTS["conjunction"])[conjunction][:, None],
        words[second] * is_pair,
    ]
    first_actions, second_actions = actions[first], actions[second] * is_pair
    command_actions = np.where(
        is_after,
        np.hstack([second_actions, first_actions]),
        np.hstack([first_actions, second_actions]),
    )
    pairs = np.stack([phrases[:, first], np.where(is_pair[:, 0], phrases[:, second], -1)], -1)
    return Commands(
        words=_packed(np.hstack(command_words)),
        actions=_packed(command_actions),
        length=(command_actions != PAD).sum(1),
        conjunction=conjunction,
        verb=pairs[0],
        direction=pairs[1],
        manner=pairs[2],
        times=pairs[3],
    )


def answers_of(
    command: Int[np.ndarray, " n"], width: int
) -> tuple[Int[np.ndarray, "n width"], Int[np.ndarray, "n width"]]:
    """Return the actions and <eos>, and <bos> and the actions, cut to a width."""
    actions, length = all_commands().actions[command], all_commands().length[command]
    padded = np.pad(actions, ((0, 0), (0, 1)))
    shifted = np.pad(actions, ((0, 0), (1, 0)), constant_values=BOS)
    padded[np.arange(len(command)), length] = EOS
    return padded[:, :width], shifted[:, :width]


def _ids(names: tuple[str, ...], *chosen: str) -> Int[np.ndarray, " chosen"]:
    """Return the ids of names; names without an id, such as "once", become padding."""
    return np.array([names.index(name) if name in names else PAD for name in chosen])


def _packed(tokens: Int[np.ndarray, "n pos"]) -> Int[np.ndarray, "n pos"]:
    """Move all padding to the end of each row."""
    return np.take_along_axis(tokens, np.argsort(tokens == PAD, axis=1, kind="stable"), 1)
