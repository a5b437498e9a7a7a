"""SCAN, as in Lake & Baroni 2018, "Generalization without Systematicity".

A command, such as `jump around left twice after walk`, is translated into a sequence of actions.
The grammar has 20,910 commands. Most splits hold out commands whose words all occur in training:
the long ones, or those that contain a certain phrase.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tasks.answers import score_sequence
from tasks.batch import Batch
from tasks.common import Key, require_choice, require_int, require_number
from tasks.finite import ExampleSet, balanced_order, small
from tasks.finite_task import FiniteTask

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

_Split = Literal[
    "simple",
    "length",
    "add_jump",
    "add_turn_left",
    "template_jump_around_right",
    "template_around_right",
    "template_opposite_right",
    "template_right",
]

_PAD, _BOS, _EOS = range(3)
_MAX_LENGTH = 48


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """Settings of SCAN. The defaults are the data set's, but for `n_id`.

    Attributes:
        split: the commands that are held out for `ood` (in brackets, the numbers of commands in the
            published training and test sets).
            "simple": none.
            "length": those with more than `cutoff` actions (16,990 and 3,920).
            "add_jump", "add_turn_left": all with the phrase `jump`, or `turn left`, but for the
            phrase alone, which is repeated in `train` (14,670 and 7,706; 21,890 and 1,208).
            `turn opposite left` does not count as this phrase.
            "template_around_right", "template_opposite_right", "template_right": all in which a
            verb other than `turn` is followed by these words, such as `walk around right` (15,225
            and 4,476); "template_jump_around_right": those with this phrase (18,528 and 1,173). As
            in Loula, Baroni, Lake 2018, "Rearranging the Familiar"; commands with `turn` and these
            words are in no split, which follows from the sizes of the published sets.
        cutoff: with "length", the most actions of a command in `train`, 1 to 47.
        n_id: commands that are moved from `train` to `id`; at least one must remain. None: 4,182
            with "simple", a fifth of all as in the data set, else 500. With 0, which "simple" does
            not allow, there is no `id`, and the sizes are the published ones.
        primitive_share: with "add_jump" and "add_turn_left", the share of `train` that is the
            phrase alone, 0 (it occurs once) to 0.9.
        seed: seeds `id` and the order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.
    """

    split: _Split
    cutoff: int = 22
    n_id: int | None = None
    primitive_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("split", self.split, get_args(_Split))
        require_int("cutoff", self.cutoff, 1, _MAX_LENGTH - 1)
        require_number("primitive_share", self.primitive_share, 0, 0.9)
        require_int("seed", self.seed, 0, 2**32 - 1)
        n_known = int(_sides(self.split, self.cutoff).known.sum())
        require_int("n_id", self.size_of_id, int(self.split == "simple"), n_known - 1)

    @property
    def size_of_id(self) -> int:
        """Number of commands of `id`: `n_id`, or its default where it is None."""
        if self.n_id is not None:
            return self.n_id
        return 4_182 if self.split == "simple" else 500


class Scan(FiniteTask[tuple[Tensor, Tensor]]):
    """SCAN: translation of commands into actions.

    Splits: `train`; `id` has other commands of the same distribution; `ood` has the commands that
    the config holds out, and is absent with "simple". The prefixes of `id` and `ood` are balanced
    over `length`.

    A batch has (token ids int64, padded with 0)
    inputs: the command [batch, 9], ids of `SCAN_WORDS`; and, for teacher forcing, `<bos>` and the
    actions [batch, target_pos], ids of `SCAN_ACTIONS`;
    targets [batch, target_pos]: the actions and `<eos>`; target_pos is one more than the most
    actions of a command of the split: 49, unless long commands are held out;
    mask [batch, target_pos]: True for the actions and `<eos>`.

    Latents (int64), whose ids are named in `SCAN_LATENTS`:
    `verb_1`, `direction_1`, `manner_1` [batch]: the first phrase; `times_1` [batch]: 1 to 3;
    `conjunction` [batch];
    `verb_2`, `direction_2`, `manner_2`, `times_2` [batch]: the second phrase, -1 if there is none;
    `length` [batch]: number of actions, 1 to 48;
    `command` [batch]: the command's number, 0 to 20,909.

    Args:
        config: the settings.
        trimmed: whether a batch is only as wide as its longest command and its longest answer. A
            model that masks the padding gives the same answers in less time.

    Example:
        `Scan(ScanConfig(split="add_jump")).batch("ood", 0, 64)`
    """

    SPLITS: ClassVar = ("train", "id", "ood")

    def __init__(self, config: ScanConfig, *, trimmed: bool = False) -> None:
        exists = {"train": True, "id": config.size_of_id > 0, "ood": config.split != "simple"}
        # A smaller `id` is the beginning of a larger one.
        super().__init__(
            key=Key(replace(config, n_id=None)),
            splits=tuple(split for split in self.SPLITS if exists[split]),
            trim=_trimmed if trimmed else None,
        )
        self.config = config

    def text(self, batch: Batch[tuple[Tensor, Tensor]], example: int) -> str:
        """Return the command of one example of a batch."""
        return " ".join(SCAN_WORDS[i] for i in batch.inputs[0][example].tolist() if i != _PAD)

    def decode(self, ids: Int[Tensor, " pos"]) -> str:
        """Return the names of the actions before the first `<eos>`.

        Args:
            ids: of `SCAN_ACTIONS`; `<pad>` and `<bos>` are skipped.
        """
        tokens = ids.tolist()
        end = tokens.index(_EOS) if _EOS in tokens else len(tokens)
        return " ".join(SCAN_ACTIONS[token] for token in tokens[:end] if token > _EOS)

    score = staticmethod(score_sequence)

    def _make(self, split: str) -> ExampleSet[tuple[Tensor, Tensor]]:
        sides = _sides(self.config.split, self.config.cutoff)
        commands = _commands()
        rows = np.flatnonzero(sides.held_out if split == "ood" else sides.known)
        width = commands.length[rows].max() + 1
        if split != "ood":
            shuffled = self._key.generator("/id").permutation(rows)
            id_rows, train_rows = np.split(shuffled, [self.config.size_of_id])
            rows = id_rows if split == "id" else train_rows
        if split == "train":
            primitive = np.flatnonzero(sides.primitive)
            share = self.config.primitive_share
            n_repeats = max(1, round(len(rows) * share / (1 - share)))
            rows = np.concatenate([rows, primitive.repeat(n_repeats)])
        else:
            generator = self._key.generator(f"/order/{split}")
            rows = rows[balanced_order(commands.length[rows], generator)]

        length = commands.length[rows]
        targets = np.pad(commands.actions[rows], ((0, 0), (0, 1)))[:, :width]
        shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=_BOS)
        targets[np.arange(len(rows)), length] = _EOS
        latents = {"conjunction": commands.conjunction, "length": commands.length}
        for name in ("verb", "direction", "manner", "times"):
            first, second = getattr(commands, name).T
            latents |= {f"{name}_1": first, f"{name}_2": second}
        return ExampleSet(
            inputs=(small(commands.words[rows]), small(shifted)),
            targets=small(targets),
            mask=torch.from_numpy(np.arange(width) <= length[:, None]),
            latents={name: small(values[rows]) for name, values in latents.items()}
            | {"command": small(rows)},
        )

    def _groups(self, train: ExampleSet[tuple[Tensor, Tensor]]) -> list[Int[np.ndarray, " member"]]:
        return [np.arange(len(train))]


def _trimmed(batch: Batch[tuple[Tensor, Tensor]]) -> Batch[tuple[Tensor, Tensor]]:
    """Remove the positions that are padding in all examples of a batch."""
    (command, actions), width = batch.inputs, int(batch.latents["length"].max()) + 1
    command_width = int((command != _PAD).sum(1).max())
    return replace(
        batch,
        inputs=(command[:, :command_width], actions[:, :width]),
        targets=batch.targets[:, :width],
        mask=batch.mask[:, :width],
    )


class _Commands(NamedTuple):
    """All commands of the grammar; -1 stands for a second phrase that is absent."""

    words: Int[np.ndarray, "command 9"]
    actions: Int[np.ndarray, "command 48"]
    length: Int[np.ndarray, " command"]
    conjunction: Int[np.ndarray, " command"]
    verb: Int[np.ndarray, "command 2"]
    direction: Int[np.ndarray, "command 2"]
    manner: Int[np.ndarray, "command 2"]
    times: Int[np.ndarray, "command 2"]


@cache
def _commands() -> _Commands:
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
    padding = np.full_like(turn, _PAD)
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
    return _Commands(
        words=_packed(np.hstack(command_words)),
        actions=_packed(command_actions),
        length=(command_actions != _PAD).sum(1),
        conjunction=conjunction,
        verb=pairs[0],
        direction=pairs[1],
        manner=pairs[2],
        times=pairs[3],
    )


def _ids(names: tuple[str, ...], *chosen: str) -> Int[np.ndarray, " chosen"]:
    """Return the ids of names; names without an id, such as "once", become padding."""
    return np.array([names.index(name) if name in names else _PAD for name in chosen])


def _packed(tokens: Int[np.ndarray, "n pos"]) -> Int[np.ndarray, "n pos"]:
    """Move all padding to the end of each row."""
    return np.take_along_axis(tokens, np.argsort(tokens == _PAD, axis=1, kind="stable"), 1)


class _Sides(NamedTuple):
    """Masks of the commands of each side; some commands are on neither."""

    known: Bool[np.ndarray, " command"]  # `train` or `id`
    held_out: Bool[np.ndarray, " command"]  # `ood`
    primitive: Bool[np.ndarray, " command"]  # the phrase that is repeated in `train`


def _sides(split: str, cutoff: int) -> _Sides:
    commands = _commands()
    none = np.zeros(len(commands.length), bool)
    if split == "simple":
        return _Sides(~none, none, none)
    if split == "length":
        held_out = commands.length > cutoff
        return _Sides(~held_out, held_out, none)

    is_verb, is_direction, is_manner = (
        {name: getattr(commands, latent) == i for i, name in enumerate(SCAN_LATENTS[latent])}
        for latent in ("verb", "direction", "manner")
    )
    if split in ("add_jump", "add_turn_left"):
        phrase = is_verb["jump"]
        if split == "add_turn_left":
            phrase = is_verb["turn"] & is_direction["left"] & is_manner["none"]
        has_phrase = phrase.any(1)
        primitive = has_phrase & (commands.conjunction == 0) & (commands.length == 1)
        return _Sides(~has_phrase, has_phrase & ~primitive, primitive)

    manner = {"template_right": "none", "template_opposite_right": "opposite"}.get(split, "around")
    template = is_direction["right"] & is_manner[manner]
    omitted = (template & is_verb["turn"]).any(1)
    if split == "template_jump_around_right":
        template &= is_verb["jump"]
    has_template = template.any(1)
    return _Sides(~has_template & ~omitted, has_template & ~omitted, none)
