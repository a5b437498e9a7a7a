"""SCAN, as in Lake & Baroni 2018, "Generalization without Systematicity".

A command, such as `jump around left twice after walk`, is translated into the actions that carry it
out. The grammar has 20,910 commands. Most splits hold out commands of a kind, though every word of
them is known from others: the long ones, or those in which one phrase occurs.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tasks.batch import Batch
from tasks.common import Key, require_choice, require_int
from tasks.finite import ExampleSet, balanced_order, small
from tasks.finite_task import FiniteTask

SCAN_LATENTS = {
    "verb": ("walk", "look", "run", "jump", "turn"),
    "direction": ("none", "left", "right"),
    "manner": ("none", "opposite", "around"),
    "conjunction": ("none", "and", "after"),
}
"""The names that the ids of the latents stand for."""

SCAN_WORDS = (
    "<pad>",
    *("walk", "look", "run", "jump", "turn"),
    *("left", "right", "opposite", "around", "twice", "thrice", "and", "after"),
)
"""The words of commands; a word's id is its index."""

SCAN_ACTIONS = (
    *("<pad>", "<bos>", "<eos>"),
    *("I_WALK", "I_LOOK", "I_RUN", "I_JUMP", "I_TURN_LEFT", "I_TURN_RIGHT"),
)
"""The actions and the marks at both ends; an action's id is its index."""

_PAD, _BOS, _EOS = range(3)
_MAX_LENGTH = 48
_SPLITS = (
    "simple",
    "length",
    "add_jump",
    "add_turn_left",
    "template_jump_around_right",
    "template_around_right",
    "template_opposite_right",
    "template_right",
)


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """Which split of the commands it is. The defaults are the data set's, but for `n_id`.

    Attributes:
        split: what is held out for `ood`.
            "simple": nothing.
            "length": the commands with more than `cutoff` actions; the data set's split has 16,990
            and 3,920 commands.
            "add_jump", "add_turn_left": all with the phrase `jump`, or `turn left`, but for the
            phrase alone, which is in `train`, again and again (14,670 and 7,706; 21,890 and 1,208).
            `turn opposite left` is another phrase.
            "template_around_right", "template_opposite_right", "template_right": all in which
            another verb than `turn` is followed by these words, such as `walk around right` (15,225
            and 4,476); "template_jump_around_right": those with this phrase (18,528 and 1,173). As
            in Loula, Baroni, Lake 2018, "Rearranging the Familiar"; commands with `turn` and these
            words are left out altogether, which follows from the sizes of the published sets.
        cutoff: of "length", the most actions that `train` has, 1 to 47.
        n_id: commands that are taken out of those of `train` for `id`, of which at least one must
            stay; None: 4,182 of "simple", a fifth of all as in the data set, else 500. With 0,
            which "simple" does not allow, there is no `id`, and the sizes are those above.
        primitive_share: of "add_jump" and "add_turn_left", how much of `train` is the phrase alone,
            0 (it is there once) to 0.9.
        seed: chooses `id` and the order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.
    """

    split: Literal[
        "simple",
        "length",
        "add_jump",
        "add_turn_left",
        "template_jump_around_right",
        "template_around_right",
        "template_opposite_right",
        "template_right",
    ]
    cutoff: int = 22
    n_id: int | None = None
    primitive_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("split", self.split, _SPLITS)
        require_int("cutoff", self.cutoff, 1, _MAX_LENGTH - 1)
        share = self.primitive_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 0.9:
            raise ValueError(f"primitive_share={share!r}: allowed is a number from 0 to 0.9")
        require_int("seed", self.seed, 0, 2**32 - 1)
        known = int(_sides(self.split, self.cutoff).known.sum())
        require_int("n_id", self.size_of_id, int(self.split == "simple"), known - 1)

    @property
    def size_of_id(self) -> int:
        """Number of commands of `id`: `n_id`, or what None stands for."""
        if self.n_id is not None:
            return self.n_id
        return 4_182 if self.split == "simple" else 500


class Scan(FiniteTask[tuple[Tensor, Tensor]]):
    """The sampler of SCAN.

    Splits: `train`; `id` has other commands of the same kinds; `ood` has what the config holds out,
    and with "simple" there is none. The prefixes of `id` and `ood` are balanced over `length`.

    A batch holds (token ids int64, 0 behind the end)
    inputs: the command [batch, 9], ids of `SCAN_WORDS`; and, for teacher forcing, `<bos>` and the
    actions [batch, target_pos], ids of `SCAN_ACTIONS`;
    targets [batch, target_pos]: the actions and `<eos>`; target_pos is one more than the most
    actions of a command that the split can hold: 49, if nothing long is left out;
    mask [batch, target_pos]: True for the actions and `<eos>`.

    Latents (int64), the names of ids in `SCAN_LATENTS`:
    `verb_1`, `direction_1`, `manner_1` [batch]: the first phrase; `times_1` [batch]: 1 to 3;
    `conjunction` [batch];
    `verb_2`, `direction_2`, `manner_2`, `times_2` [batch]: the second phrase, -1 if there is none;
    `length` [batch]: number of actions, 1 to 48;
    `command` [batch]: its number, 0 to 20,909.

    Args:
        config: what is held out.
        trimmed: whether a batch is only as wide as its longest command and its longest answer. A
            model that heeds the padding answers the same, in less time.
    """

    SPLITS: ClassVar = ("train", "id", "ood")

    def __init__(self, config: ScanConfig, *, trimmed: bool = False) -> None:
        there_are = {"train": True, "id": config.size_of_id > 0, "ood": config.split != "simple"}
        # How many commands `id` has does not change which come first.
        super().__init__(
            key=Key(replace(config, n_id=None)),
            splits=tuple(split for split in self.SPLITS if there_are[split]),
            trim=_trimmed if trimmed else None,
        )
        self.config = config

    def text(self, batch: Batch[tuple[Tensor, Tensor]], example: int) -> str:
        """Return the command of one example of a batch as it is written."""
        return " ".join(SCAN_WORDS[i] for i in batch.inputs[0][example].tolist() if i != _PAD)

    def decode(self, ids: Int[Tensor, " pos"]) -> str:
        """Return the names of actions up to the first `<eos>`, which is not among them.

        Args:
            ids: of `SCAN_ACTIONS`; `<pad>` and `<bos>` are passed over.
        """
        names = []
        for one in ids.tolist():
            if one == _EOS:
                break
            if one not in (_PAD, _BOS):
                names.append(SCAN_ACTIONS[one])
        return " ".join(names)

    def score(
        self, output: Int[Tensor, "batch pos"], batch: Batch[tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor]:
        """Return how right the answers are.

        Args:
            output: [batch, pos], ids of `SCAN_ACTIONS`, from the first action on, whether decoded
                greedily or the argmax of teacher-forced logits. It may be shorter or longer than
                the targets; what follows the place of their `<eos>` is not read.
            batch: the batch that they answer.

        Returns:
            `correct` [batch]: 1 where all actions and `<eos>` are right, else 0: either kind of
            output gives the same;
            `token_correct` [batch]: the share of these that is right, in which the kinds differ.

        Raises:
            ValueError: `output` has another shape, or holds no whole numbers.
        """
        n, width = batch.targets.shape
        if output.ndim != 2 or len(output) != n or output.is_floating_point():
            raise ValueError(
                f"output of shape {tuple(output.shape)} and {output.dtype}: allowed are whole "
                f"numbers, ({n}, any)"
            )
        missing = max(0, width - output.shape[1])
        answers = torch.nn.functional.pad(output, (0, missing), value=_PAD)[:, :width]
        right = (answers == batch.targets) & batch.mask
        token_correct = right.sum(1) / batch.mask.sum(1)
        return {"correct": (token_correct == 1).float(), "token_correct": token_correct}

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
    """Return a batch without the columns that are padding in all of its examples."""
    (command, actions), width = batch.inputs, int(batch.latents["length"].max()) + 1
    words = int((command != _PAD).sum(1).max())
    return replace(
        batch,
        inputs=(command[:, :words], actions[:, :width]),
        targets=batch.targets[:, :width],
        mask=batch.mask[:, :width],
    )


class _Commands(NamedTuple):
    """All commands; what describes a phrase is -1 where there is no second one."""

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
    # The phrases, each done once, twice and thrice. Only with a direction is there a manner.
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
    nothing = np.full_like(turn, _PAD)
    plainly = [turn, act, *[nothing] * 6]
    opposite = [turn, turn, act, *[nothing] * 5]
    around = [turn, act] * 4
    once = np.array([plainly, opposite, around])[manner, :, np.arange(len(turn))]
    actions = np.tile(once, 3) * (np.arange(24) // 8 < times[:, None])

    # One of them alone, or two with a conjunction.
    n = len(turn)
    alone, (first, second) = np.arange(n), np.divmod(np.arange(n * n), n)
    first, second = (np.concatenate([alone, one, one]) for one in (first, second))
    conjunction = np.repeat([0, 1, 2], [n, n * n, n * n])
    is_pair, is_after = (conjunction > 0)[:, None], (conjunction == 2)[:, None]
    said = [
        words[first],
        _ids(SCAN_WORDS, *SCAN_LATENTS["conjunction"])[conjunction][:, None],
        words[second] * is_pair,
    ]
    one, other = actions[first], actions[second] * is_pair
    done = np.where(is_after, np.hstack([other, one]), np.hstack([one, other]))
    pairs = np.stack([phrases[:, first], np.where(is_pair[:, 0], phrases[:, second], -1)], -1)
    return _Commands(
        words=_packed(np.hstack(said)),
        actions=_packed(done),
        length=(done != _PAD).sum(1),
        conjunction=conjunction,
        verb=pairs[0],
        direction=pairs[1],
        manner=pairs[2],
        times=pairs[3],
    )


def _ids(names: tuple[str, ...], *chosen: str) -> Int[np.ndarray, " chosen"]:
    """Return the ids of some names; what has none, such as "once", is padding."""
    return np.array([names.index(name) if name in names else _PAD for name in chosen])


def _packed(tokens: Int[np.ndarray, "n pos"]) -> Int[np.ndarray, "n pos"]:
    """Return the tokens in their order with all padding at the end."""
    return np.take_along_axis(tokens, np.argsort(tokens == _PAD, axis=1, kind="stable"), 1)


class _Sides(NamedTuple):
    """Which commands are where; some are nowhere."""

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
        {name: getattr(commands, of) == i for i, name in enumerate(SCAN_LATENTS[of])}
        for of in ("verb", "direction", "manner")
    )
    if split in ("add_jump", "add_turn_left"):
        phrase = is_verb["jump"]
        if split == "add_turn_left":
            phrase = is_verb["turn"] & is_direction["left"] & is_manner["none"]
        found = phrase.any(1)
        # Alone, the phrase is the shortest of all that have it.
        primitive = found & (commands.conjunction == 0) & (commands.length == 1)
        return _Sides(~found, found & ~primitive, primitive)

    manner = {"template_right": "none", "template_opposite_right": "opposite"}.get(split, "around")
    template = is_direction["right"] & is_manner[manner]
    left_out = (template & is_verb["turn"]).any(1)
    if split == "template_jump_around_right":
        template &= is_verb["jump"]
    found = template.any(1)
    return _Sides(~found & ~left_out, found & ~left_out, none)
