"""SCAN, as in Lake & Baroni 2018, "Generalization without Systematicity".

A command, such as `jump around left twice after walk`, is translated into a sequence of actions.
The grammar has 20,910 commands. Most splits hold out commands whose words all occur in training:
the long ones, or those that contain a certain phrase.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tasks.answers import score_sequence
from tasks.batch import Batch
from tasks.causal import Allowed, CausalTask, Entries, Variable, integers
from tasks.common import Key, require_choice, require_int, require_number
from tasks.finite import ExampleSet, balanced_order, small
from tasks.finite_task import FiniteTask
from tasks.rows import find_rows
from tasks.scan_grammar import (
    EOS,
    PAD,
    SCAN_ACTIONS,
    SCAN_LATENTS,
    SCAN_WORDS,
    all_commands,
    answers_of,
)

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

_MAX_LENGTH = 48
_PHRASE = ("verb", "direction", "manner", "times")


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

    Example:
        >>> task = Scan(ScanConfig(split="add_jump", n_id=0))
        >>> task.size("train"), task.size("ood")  # as published
        (14670, 7706)
        >>> "jump" in task.text(task.batch("ood", 0, 1), 0)
        True
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


class Scan(FiniteTask[tuple[Tensor, Tensor]], CausalTask[tuple[Tensor, Tensor]]):
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

    Causal model: the conjunction and both phrases can be set; without a conjunction there is no
    second phrase. The mask is False where the phrases make no command (then `command` is -1 and
    `length` 0, and inputs and targets stay), and where the command or its actions are longer than
    the batch is wide.

    Args:
        config: the settings.
        trimmed: whether a batch is only as wide as its longest command and its longest answer. A
            model that masks the padding gives the same answers in less time.

    Example:
        >>> Scan(ScanConfig(split="add_jump")).batch("ood", 0, 64)
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
        return " ".join(SCAN_WORDS[i] for i in batch.inputs[0][example].tolist() if i != PAD)

    def decode(self, ids: Int[Tensor, " pos"]) -> str:
        """Return the names of the actions before the first `<eos>`.

        Args:
            ids: of `SCAN_ACTIONS`; `<pad>` and `<bos>` are skipped.
        """
        tokens = ids.tolist()
        end = tokens.index(EOS) if EOS in tokens else len(tokens)
        return " ".join(SCAN_ACTIONS[token] for token in tokens[:end] if token > EOS)

    score = staticmethod(score_sequence)

    def _make(self, split: str) -> ExampleSet[tuple[Tensor, Tensor]]:
        sides = _sides(self.config.split, self.config.cutoff)
        commands = all_commands()
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

        targets, shifted = answers_of(rows, width)
        latents = {"conjunction": commands.conjunction, "length": commands.length}
        for name in _PHRASE:
            first, second = getattr(commands, name).T
            latents |= {f"{name}_1": first, f"{name}_2": second}
        return ExampleSet(
            inputs=(small(commands.words[rows]), small(shifted)),
            targets=small(targets),
            mask=torch.from_numpy(np.arange(width) <= commands.length[rows, None]),
            latents={name: small(values[rows]) for name, values in latents.items()}
            | {"command": small(rows)},
        )

    @property
    def _variables(self) -> dict[str, Variable]:
        variables = {"conjunction": Variable(allowed=integers(0, 2))}
        for name in _PHRASE:
            low, high = (1, 3) if name == "times" else (0, len(SCAN_LATENTS[name]) - 1)
            variables[f"{name}_1"] = Variable(allowed=integers(low, high))
            variables[f"{name}_2"] = Variable(
                causes=("conjunction",),
                compute=_of_second_phrase,
                allowed=_or_none(low, high),
                within=True,
                exogenous=True,
            )
        return variables | {
            "command": Variable(causes=tuple(variables), compute=_command),
            "length": Variable(causes=("command",), compute=_length),
            "inputs": Variable(causes=("command",), compute=_shown, within=True),
            "targets": Variable(causes=("command",), compute=_targets, within=True),
            "mask": Variable(causes=("command", "length", "inputs", "targets"), compute=_mask),
        }

    def _groups(self, train: ExampleSet[tuple[Tensor, Tensor]]) -> list[Int[np.ndarray, " member"]]:
        return [np.arange(len(train))]


def _trimmed(batch: Batch[tuple[Tensor, Tensor]]) -> Batch[tuple[Tensor, Tensor]]:
    """Remove the positions that are padding in all examples of a batch."""
    (command, actions), width = batch.inputs, int(batch.latents["length"].max()) + 1
    command_width = int((command != PAD).sum(1).max())
    return replace(
        batch,
        inputs=(command[:, :command_width], actions[:, :width]),
        targets=batch.targets[:, :width],
        mask=batch.mask[:, :width],
    )


def _or_none(low: int, high: int) -> Allowed:
    return Allowed(
        f"integers from {low} to {high}, or -1 for none",
        lambda new, _: ((new >= low) & (new <= high)) | (new == -1),
    )


def _of_second_phrase(conjunction: Int[Tensor, " n"], entries: Entries) -> Int[Tensor, " n"]:
    return torch.where(conjunction == 0, -1, entries.values)


def _command(conjunction: Int[Tensor, " n"], *phrases: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Return the number of a command, -1 if there is none.

    Args:
        conjunction: its id.
        phrases: verbs, directions, manners and times, each of the first and the second phrase.
    """
    commands = all_commands()
    keys = [commands.conjunction]
    for name in _PHRASE:
        keys.extend(getattr(commands, name).T)
    is_pair = conjunction > 0
    seconds = [torch.where(is_pair, phrase, -1) for phrase in phrases[1::2]]
    values = [part for pair in zip(phrases[::2], seconds, strict=True) for part in pair]
    wanted = torch.stack([conjunction, *values], 1)
    return torch.from_numpy(find_rows(wanted.numpy(), [np.stack(keys, 1)]))


def _length(command: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    return torch.where(command < 0, 0, torch.from_numpy(all_commands().length)[command])


def _shown(
    command: Int[Tensor, " n"], entries: Entries
) -> tuple[Int[Tensor, "n pos"], Int[Tensor, "n target_pos"]]:
    """Return the inputs of commands in the width of the batch's, which stay if there is none."""
    words, shifted = entries.values
    new_words = torch.from_numpy(all_commands().words)[command, : words.shape[1]]
    _, new_shifted = answers_of(command.numpy(), shifted.shape[1])
    is_command = (command >= 0)[:, None]
    return (
        torch.where(is_command, new_words, words),
        torch.where(is_command, torch.from_numpy(new_shifted), shifted),
    )


def _targets(command: Int[Tensor, " n"], entries: Entries) -> Int[Tensor, "n target_pos"]:
    targets, _ = answers_of(command.numpy(), entries.values.shape[1])
    return torch.where((command >= 0)[:, None], torch.from_numpy(targets), entries.values)


def _mask(
    command: Int[Tensor, " n"],
    length: Int[Tensor, " n"],
    inputs: tuple[Int[Tensor, "n pos"], Int[Tensor, "n target_pos"]],
    targets: Int[Tensor, "n target_pos"],
) -> Bool[Tensor, "n target_pos"]:
    width = targets.shape[1]
    n_words = torch.from_numpy((all_commands().words != PAD).sum(1))[command]
    is_complete = (command >= 0) & (length < width) & (n_words <= inputs[0].shape[1])
    return is_complete[:, None] & (torch.arange(width) <= length[:, None])


class _Sides(NamedTuple):
    """Masks of the commands of each side; some commands are on neither."""

    known: Bool[np.ndarray, " command"]  # `train` or `id`
    held_out: Bool[np.ndarray, " command"]  # `ood`
    primitive: Bool[np.ndarray, " command"]  # the phrase that is repeated in `train`


def _sides(split: str, cutoff: int) -> _Sides:
    commands = all_commands()
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
