"""The JSON part of a checkpoint: positions and open groups of the end of a step, from which the
intake is restored. With takes still to repeat (`ahead`) the ledger's position is older, and
finished takes are recognised by their step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rollstream.consumers.trainer.data.groups import GroupIntake
from rollstream.errors import CorruptObject
from rollstream.streams.foreign_text import whole_number
from rollstream.streams.records import Position
from rollstream.streams.values import Address


@dataclass(frozen=True, slots=True)
class CheckpointGroup:
    """Addresses of an open group's admission, completions and annotations."""

    admitted: Address
    arrived: tuple[Address, ...]
    noted: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """`positions` maps topic and partition (as text, for JSON) to the next offset and its fence;
    `counts` are the intake's unused records.
    """

    step: int
    updates: int
    ledger: Position
    positions: dict[str, dict[str, Position]]
    groups: tuple[CheckpointGroup, ...]
    counts: dict[str, int]
    configuration_hash: str
    """That of the ledger's records from `ledger` to the next `Configured`."""
    ahead: bool = False
    """Whether the ledger had takes of later steps, still to be repeated. They may name records
    before `positions`.
    """
    ended: tuple[int, ...] = ()
    """Groups that ended before their admission was read: the admission must not open them again."""
    terms: tuple[tuple[int, int], ...] = ()
    """Each version's term (`BelievedVersions.terms`): a trainer masks the same tokens from any
    checkpoint.
    """
    open_groups: tuple[int, ...] = ()
    """Numbers of `groups`: a fork needs no log to know which prompts are left."""
    next_group: int = 0
    """The group after the last admission that was read; 0 in checkpoints of earlier releases."""

    def encode(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)

    @classmethod
    def decode(cls, values: Mapping[str, Any]) -> "TrainerState":
        """Raises `CorruptObject` for values that `encode` did not give."""
        try:
            state = msgspec.convert(values, cls)
        except (ValueError, RecursionError, OverflowError) as error:
            raise CorruptObject(f"the state of a checkpoint is no trainer's: {error}") from error
        for topic, by in state.positions.items():
            if any(whole_number(partition) is None for partition in by):
                raise CorruptObject(f"a checkpoint has positions of no partitions of {topic}")
        return state

    def intake_positions(self) -> dict[str, dict[int, Position]]:
        """`positions` with partitions as numbers, where a restored intake reads on."""
        return {t: {int(p): at for p, at in by.items()} for t, by in self.positions.items()}


def trainer_state(
    step: int,
    updates: int,
    ledger: Position,
    intake: GroupIntake,
    configuration_hash: str,
    ahead: bool = False,
    terms: tuple[tuple[int, int], ...] = (),
) -> TrainerState:
    return TrainerState(
        step=step,
        updates=updates,
        ledger=ledger,
        positions={
            topic: {str(p): at for p, at in by.items()} for topic, by in intake.positions().items()
        },
        groups=tuple(
            CheckpointGroup(
                group.at,
                tuple(a.member.at for a in group.arrived.values()),
                tuple(n.used.at for n in group.annotations.values()),
            )
            for group in intake.open.values()
        ),
        counts=dict(intake.counts),
        configuration_hash=configuration_hash,
        ahead=ahead,
        ended=tuple(sorted(intake.ended)),
        terms=terms,
        open_groups=tuple(intake.open),
        next_group=intake.next_group,
    )


def missing_records(state: TrainerState, end: Callable[[str], Mapping[int, int]]) -> str:
    """Returns which records read at the checkpoint the log lacks, as the end of a sentence; "" if
    none. `end` gives the ends of a topic's partitions.
    """
    read = {"ledger": {"0": state.ledger}, **state.positions}
    for topic, by in read.items():
        ends = end(topic)
        for partition, at in by.items():
            # Ends never move back: an earlier end is of another log, or of one that lost files.
            if at.offset > (has := ends.get(int(partition), 0)):
                return (
                    f"{topic}/{partition} ends at {has}, and the checkpoint of step {state.step} "
                    f"has read it up to {at.offset}"
                )
    return ""


def ledger_begin(state: TrainerState | None) -> tuple[Position, str]:
    """Returns position and configuration hash from which a trainer reads the ledger: those of
    `state`, or the begin.
    """
    return (Position(), "") if state is None else (state.ledger, state.configuration_hash)


def restore_intake(intake: GroupIntake, state: TrainerState) -> None:
    for group in state.groups:
        intake.restore(group.admitted, group.arrived, group.noted)
    for group in state.ended:
        intake.end(group)
    intake.counts.update(state.counts)
    # Counted already in the steps up to the checkpoint's.
    intake.take_refused_annotations()
    intake.next_group = max(intake.next_group, state.next_group)
