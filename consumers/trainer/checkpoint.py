"""What a checkpoint of the trainer holds beside the tensors, and how intake is restored from it.

Positions and open groups are of one moment, the end of a step. Every take and close of a later step
lies behind the ledger's position: also those that an earlier term left and that are still to be
repeated, in which case takes up to that step lie there too and are passed over by their step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from consumers.trainer.intake import Intake
from streams.records import Address, Position


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """An open group by addresses."""

    admitted: Address
    arrived: tuple[Address, ...]
    noted: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The JSON part of a checkpoint; `positions` by topic, partition (as text, for JSON) and next
    offset with fence.
    """

    step: int
    updates: int
    ledger: Position
    positions: dict[str, dict[str, Position]]
    groups: tuple[KeptGroup, ...]
    counts: dict[str, int]
    configuration_hash: str
    ahead: bool = False
    """Takes of later steps are still to be repeated: they name records before `positions`."""
    ended: tuple[int, ...] = ()
    """Groups that ended before their admission was read: it must not open them again."""
    terms: tuple[tuple[int, int], ...] = ()
    """Who published which versions (`Believed.terms`): what is masked must not change with where a
    trainer goes on from.
    """

    def encode(self) -> dict[str, Any]:
        """Plain JSON values."""
        return msgspec.to_builtins(self)

    @classmethod
    def decode(cls, values: Mapping[str, Any]) -> "TrainerState":
        """The state again; wrong types raise `msgspec.ValidationError`."""
        return msgspec.convert(values, cls)

    def intake_positions(self) -> dict[str, dict[int, Position]]:
        return {t: {int(p): at for p, at in by.items()} for t, by in self.positions.items()}


def trainer_state(
    step: int,
    updates: int,
    ledger: Position,
    intake: Intake,
    configuration_hash: str,
    ahead: bool = False,
    terms: tuple[tuple[int, int], ...] = (),
) -> TrainerState:
    """The state at the end of a step."""
    return TrainerState(
        step=step,
        updates=updates,
        ledger=ledger,
        positions={
            topic: {str(p): at for p, at in by.items()} for topic, by in intake.positions().items()
        },
        groups=tuple(
            KeptGroup(
                group.at,
                tuple(a.member.at for a in group.arrived.values()),
                tuple(n.used.at for n in group.noted.values()),
            )
            for group in intake.open.values()
        ),
        counts=dict(intake.counts),
        configuration_hash=configuration_hash,
        ahead=ahead,
        ended=tuple(sorted(intake.ended)),
        terms=terms,
    )


def restore_intake(intake: Intake, state: TrainerState) -> None:
    """Open the checkpoint's groups again; reading on brings the rest."""
    for group in state.groups:
        intake.restore(group.admitted, group.arrived, group.noted)
    for group in state.ended:
        intake.end(group)
    intake.counts.update(state.counts)
