"""Knows the annotations in the log, so that a scorer asks for none again. Scorer A publishes one
and is killed before it commits its batch. B reads the batch again, then `annotations` up to its
present end, and so sees it. If A lives on as a zombie, both may ask; the first record counts.
"""

from collections.abc import Collection

from rollstream.errors import PositionLost
from rollstream.streams.admissible import is_usable_annotation
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Annotation

TOPIC = "annotations"
TRAJECTORIES_MAX = 1 << 20
"""Trajectories before these were committed long ago: only a batch of each scorer is uncommitted."""


class RecordedAnnotations:
    """From the first kept record of `annotations`. Those that the trainer would not use count as
    not recorded.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._reader: TopicReader | None = None
        self._names: dict[str, set[str]] = {}

    def advance(self) -> None:
        """Reads up to the present end of the log; after a truncation the kept records."""
        end = self._bus.end(TOPIC)
        try:
            self._read_to(end)
        except PositionLost:
            self._reader = None
            self._read_to(end)

    def has(self, trajectory: str, names: Collection[str]) -> bool:
        return self._names.get(trajectory, set()).issuperset(names)

    def _read_to(self, end: dict[int, int]) -> None:
        if self._reader is None:
            self._reader = TopicReader(self._bus, TOPIC, from_begin(self._bus, TOPIC))
        for received in self._reader.read_to(end):
            record = received.record
            if isinstance(record, Annotation) and is_usable_annotation(record):
                self._names.setdefault(record.trajectory, set()).add(record.name)
        while len(self._names) > TRAJECTORIES_MAX:
            del self._names[next(iter(self._names))]
