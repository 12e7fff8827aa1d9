"""What the trainer truncates after a checkpoint (invariant 11): of the topics that it, dispatch and
the archive read, everything that none of them needs.

It goes up to the least of: what the oldest kept checkpoint would read again (its positions, and the
records of groups that were open in it), from where dispatch can rebuild, and what is archived (the
end, where no archive runs). Who has never said how far it is stops all of it. A trainer that was
replaced and goes on truncates less, never more: each bound only moves forwards.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from consumers.trainer.checkpoint import TrainerState
from storage.blobs import collect_blobs
from storage.checkpoints import CheckpointId, checkpoint_state
from storage.objects import ObjectStore
from streams.bus import Bus
from streams.records import Address, Position
from streams.topics import catalogue
from streams.truncation import before_record, earliest, truncate

log = logging.getLogger(__name__)

DISPATCH, ARCHIVE = "dispatch", "archive"
"""Groups under which those two commit how far they are."""
REBUILT = ("admissions", "trajectories", "ledger")
"""Topics that dispatch rebuilds from."""
TOPICS = ("admissions", "trajectories", "annotations", "ledger", "applied")


@dataclass(frozen=True, slots=True)
class Forgetting:
    """`archived` are the topics that an archive keeps: nothing of them goes before it is there."""

    bus: Bus
    store: ObjectStore
    archived: Collection[str]

    def run(self, kept: Iterable[CheckpointId]) -> None:
        """Truncate what is not needed beside these checkpoints."""
        states = [TrainerState.decode(checkpoint_state(self.store, one)) for one in kept]
        if not states:
            return
        for topic in TOPICS:
            bounds = [self._needed(topic, state) for state in states]
            if topic in REBUILT:
                bounds.append(self.bus.committed(DISPATCH, topic))
            if topic in self.archived:
                bounds.append(self.bus.committed(ARCHIVE, topic))
            lost = truncate(self.bus, topic, earliest(bounds))
            if lost:
                log.info("%s: %d records are not needed any more", topic, sum(lost.values()))
        collect_blobs(self.bus, self.store, (topic.name for topic in catalogue()))

    def _needed(self, topic: str, state: TrainerState) -> Mapping[int, Position]:
        """From where a trainer that starts from this checkpoint reads."""
        if topic == "ledger":
            return {0: state.ledger}
        positions = state.intake_positions().get(topic)
        if positions is None:  # `applied`: a trainer does not read it
            return {p: Position(end) for p, end in self.bus.end(topic).items()}
        needed = dict(positions)
        for address in _addresses(topic, state):
            if address.offset < needed[address.partition].offset:
                needed[address.partition] = before_record(self.bus, topic, address)
        return needed


def _addresses(topic: str, state: TrainerState) -> Sequence[Address]:
    """The oldest record of the checkpoint's open groups, per partition."""
    by_topic = {
        "admissions": [group.admitted for group in state.groups],
        "trajectories": [at for group in state.groups for at in group.arrived],
        "annotations": [at for group in state.groups for at in group.noted],
    }
    oldest: dict[int, Address] = {}
    for address in by_topic[topic]:
        oldest[address.partition] = min(oldest.get(address.partition, address), address)
    return list(oldest.values())
