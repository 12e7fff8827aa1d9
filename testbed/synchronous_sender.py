"""A rollout's sender that publishes at once: a `RecordSender` without a thread."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollstream.producers.rollout.sender import OnPublished, OnRefused
from rollstream.streams.bus import Bus
from rollstream.streams.writer import KeyedRecord, append_encoded, encode_each


@dataclass(frozen=True, slots=True)
class SynchronousSender:
    bus: Bus

    def send(
        self,
        topic: str,
        records: Sequence[KeyedRecord],
        on_published: OnPublished | None = None,
        is_urgent: bool = False,
        on_refused: OnRefused | None = None,
    ) -> None:
        entries, refused = encode_each(self.bus, topic, records)
        for index, reason in refused.items():
            if on_refused is not None:
                on_refused(index, reason)
        addresses = append_encoded(self.bus, topic, entries)
        if on_published is not None and addresses:
            on_published(addresses)

    def flush(self) -> None:
        """Returns at once: nothing is queued."""
