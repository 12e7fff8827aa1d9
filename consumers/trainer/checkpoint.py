"""What a checkpoint of the trainer holds beside the tensors, and how intake is restored from it.

Positions, open groups and the ledger's position are of one moment, the end of a step: every take up
to that step lies before the ledger's position and none after it. So what the ledger holds behind it
is exactly what is to be repeated.
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
    step: int, updates: int, ledger: Position, intake: Intake, configuration_hash: str
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
    )


def restore_intake(intake: Intake, state: TrainerState) -> None:
    """Open the checkpoint's groups again; reading on brings the rest."""
    for group in state.groups:
        intake.restore(group.admitted, group.arrived, group.noted)
    intake.counts.update(state.counts)
