"""Truncates topics after a checkpoint (invariant 11): removes the records that neither the trainer
nor dispatch nor the archive needs.

Each topic is truncated up to the least of three bounds: what the oldest kept checkpoint would read
again (its positions, and the records of groups that were open in it), the position from which
dispatch can rebuild its state, and the archived position (the end, where no archive runs). A role
that never committed its position stops truncation. A trainer that was replaced but still runs
truncates less, never more: each bound only moves forwards.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.storage.blobs import collect_blobs
from rollstream.storage.checkpoints import CheckpointId, checkpoint_state
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus
from rollstream.streams.values import Address
from rollstream.streams.records import Position
from rollstream.streams.truncation import ARCHIVE_GROUP, DISPATCH_GROUP, REBUILD_TOPICS, move_back_to_oldest, earliest_positions, truncate

log = logging.getLogger(__name__)

TOPICS = ("admissions", "trajectories", "annotations", "ledger", "applied")


@dataclass(frozen=True, slots=True)
class LogTruncation:
    """`archived` names the topics that an archive keeps: their records are truncated only after
    they were archived.
    """

    bus: Bus
    store: ObjectStore
    archived: Collection[str]

    def run(self, kept: Iterable[CheckpointId]) -> None:
        """Truncate the records that none of these kept checkpoints needs."""
        states = [TrainerState.decode(checkpoint_state(self.store, one)) for one in kept]
        if not states or any(state.ahead for state in states):
            return
        for topic in TOPICS:
            bounds = [self._needed(topic, state) for state in states]
            if topic in REBUILD_TOPICS:
                bounds.append(self.bus.committed(DISPATCH_GROUP, topic))
            if topic in self.archived:
                bounds.append(self.bus.committed(ARCHIVE_GROUP, topic))
            lost = truncate(self.bus, topic, earliest_positions(bounds))
            if lost:
                log.info("%s: %d records truncated", topic, sum(lost.values()))
        collect_blobs(self.bus, self.store)

    def _needed(self, topic: str, state: TrainerState) -> Mapping[int, Position]:
        """The positions from which a trainer that starts from this checkpoint reads."""
        if topic == "ledger":
            return {0: state.ledger}
        positions = state.intake_positions().get(topic)
        if positions is None:  # `applied`: a trainer does not read it
            return {p: Position(end) for p, end in self.bus.end(topic).items()}
        return move_back_to_oldest(self.bus, topic, positions, _addresses(topic, state))


def _addresses(topic: str, state: TrainerState) -> Iterable[Address]:
    """The records of the groups that were open in the checkpoint."""
    match topic:
        case "admissions":
            return (group.admitted for group in state.groups)
        case "trajectories":
            return (at for group in state.groups for at in group.arrived)
        case _:
            return (at for group in state.groups for at in group.noted)
