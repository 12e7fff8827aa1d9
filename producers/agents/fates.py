"""Finds in the log what became of an episode that is not open here: it has ended, or a rollout is
to take it up.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from rollstream.errors import PositionLost
from rollstream.producers.agents.directory import EPISODES_MAX, RolloutDirectory
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Trajectory
from rollstream.streams.topics import partition_of

TOPIC = "trajectories"


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """Holds how an episode ended: its `reward` (None: it comes later), or the `failure`."""

    group: int
    reward: float | None
    failure: str = ""

    def agrees(self, reward: float | None, failure: str) -> bool:
        """Returns whether a program asked for this end: this `reward` (None: any), or this
        `failure`.
        """
        if failure or self.failure:
            return failure == self.failure.removeprefix("agent: ")
        return reward is None or reward == self.reward


@dataclass(slots=True)
class EpisodeFates:
    """Follows the ends of episodes in the log. Threads may call it."""

    bus: Bus
    _ends: OrderedDict[str, EpisodeEnd] = field(
        default_factory=lambda: OrderedDict[str, EpisodeEnd]()
    )
    _readers: dict[int, TopicReader] = field(default_factory=dict[int, TopicReader])
    _directory: RolloutDirectory = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._directory = RolloutDirectory(self.bus)

    def end_of(self, trajectory: str) -> EpisodeEnd | None:
        """Returns how the episode ended, as far as the log still has it; None if it has not."""
        # A program asks whose rollout was killed, or whose last answer was lost. Nothing is read
        # before.
        group = trajectory.rpartition(".")[0]
        with self._lock:
            self._read(partition_of(group.encode(), self.bus.partitions(TOPIC)))
            return self._ends.get(trajectory)

    def is_assigned(self, trajectory: str) -> bool:
        # The log keeps the order of an episode while that is open.
        with self._lock:
            self._directory.read(to_end=True)
            return self._directory.is_assigned(trajectory)

    def _read(self, partition: int) -> None:
        if partition not in self._readers:
            begin = from_begin(self.bus, TOPIC)[partition]
            self._readers[partition] = TopicReader(self.bus, TOPIC, {partition: begin})
        end = {partition: self.bus.end(TOPIC)[partition]}
        try:
            for batch in self._readers[partition].batches_to(end):
                for received in batch:
                    if isinstance(received.record, Trajectory):
                        self._keep(received.record)
        except PositionLost:  # what was truncated unread was trained; read on from the new begin
            del self._readers[partition]

    def _keep(self, record: Trajectory) -> None:
        end = EpisodeEnd(record.group, record.reward, record.reason)
        # The first completion alone counts (invariant 2).
        self._ends.setdefault(record.trajectory, end)
        while len(self._ends) > EPISODES_MAX:
            self._ends.popitem(last=False)
