"""Finds the rollout that runs an episode by the log: its name and term in `assignments`, its
address in `status`.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from rollstream.errors import PositionLost
from rollstream.streams.bus import Bus
from rollstream.streams.reader import Received, TopicReader, from_begin
from rollstream.streams.records import Assignment, RolloutStatus

EPISODES_MAX = 200_000  # newest assignments that are kept


@dataclass(slots=True)
class RolloutDirectory:
    """Holds the newest assignment of each episode and the newest status of each rollout."""

    bus: Bus
    _assigned: OrderedDict[str, Assignment] = field(
        default_factory=lambda: OrderedDict[str, Assignment]()
    )
    _rollouts: dict[str, RolloutStatus] = field(default_factory=dict[str, RolloutStatus])
    _readers: dict[str, TopicReader] = field(default_factory=dict[str, TopicReader])

    def read(self, to_end: bool = False) -> None:
        """Reads new records of both topics; with `to_end` all that are in the log now."""
        for topic in ("status", "assignments"):
            for received in self._follow(topic, to_end):
                self._apply(received)

    def is_released(self, trajectory: str) -> bool:
        """Returns whether dispatch released the episode: its group needs it no more."""
        assigned = self._assigned.get(trajectory)
        return assigned is not None and assigned.kind == "release" and not assigned.onward

    def is_assigned(self, trajectory: str) -> bool:
        """Returns whether a rollout has the episode, or is to take it up."""
        return trajectory in self._assigned and not self.is_released(trajectory)

    def readers(self) -> list[TopicReader]:
        return list(self._readers.values())

    def url_of(self, trajectory: str) -> str:
        """Returns the address of the rollout that runs the episode; "" if none does."""
        assigned = self._assigned.get(trajectory)
        if assigned is None or assigned.kind == "release":
            return ""
        rollout = self._rollouts.get(assigned.rollout)
        # The status of another term is that of a replaced process.
        is_there = rollout is not None and rollout.term == assigned.rollout_term
        return rollout.url if rollout is not None and is_there else ""

    def urls(self) -> list[str]:
        return [rollout.url for _, rollout in sorted(self._rollouts.items()) if rollout.url]

    def _follow(self, topic: str, to_end: bool) -> list[Received]:
        if topic not in self._readers:
            self._readers[topic] = TopicReader(self.bus, topic, from_begin(self.bus, topic))
        try:
            reader = self._readers[topic]
            return reader.read_to(self.bus.end(topic)) if to_end else reader.follow()
        except PositionLost:  # truncated records are of episodes that have ended
            del self._readers[topic]
            return []

    def _apply(self, received: Received) -> None:
        record = received.record
        if isinstance(record, RolloutStatus):
            status = self._rollouts.get(record.rollout)
            if status is None or record.term >= status.term:
                self._rollouts[record.rollout] = record
        elif isinstance(record, Assignment):
            assignment = self._assigned.get(record.trajectory)
            if assignment is None or record.attempt >= assignment.attempt:
                self._assigned[record.trajectory] = record
                self._assigned.move_to_end(record.trajectory)
            while len(self._assigned) > EPISODES_MAX:
                self._assigned.popitem(last=False)
