"""A rollout's sender that publishes at once: a `RecordSender` without a thread."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollstream.producers.rollout.publisher import OnPublished
from rollstream.streams.bus import Bus
from rollstream.streams.writer import KeyedRecord, publish_all


@dataclass(frozen=True, slots=True)
class SynchronousSender:
    bus: Bus

    def send(
        self,
        topic: str,
        records: Sequence[KeyedRecord],
        on_published: OnPublished | None = None,
        is_urgent: bool = False,
    ) -> None:
        addresses = publish_all(self.bus, topic, records)
        if on_published is not None:
            on_published(addresses)

    def flush(self) -> None:
        """Return at once: nothing is queued."""
