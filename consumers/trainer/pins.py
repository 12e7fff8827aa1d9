"""Versions that retention must keep because a living rollout holds them (invariant 11)."""

from streams.bus import Bus
from streams.reader import TopicReader, from_begin
from streams.records import RolloutStatus, Version

LIVE_S = 60.0  # a rollout silent for longer than any heartbeat timeout refetches the newest anyway


class HeldVersions:
    """Follows `status`; knows what every rollout said last."""

    def __init__(self, bus: Bus) -> None:
        self._reader = TopicReader(bus, "status", from_begin(bus, "status"))
        self._newest: dict[str, RolloutStatus] = {}

    def __call__(self) -> set[Version]:
        """Versions held by rollouts that spoke in the minute before the last word of
        any of them.
        """
        for received in self._reader.follow(records_max=4096):
            if isinstance(received.record, RolloutStatus):
                self._newest[received.record.rollout] = received.record
        said = self._newest.values()
        last = max((status.time_s for status in said), default=0.0)
        return {s.version for s in said if s.health != "leaving" and last - s.time_s < LIVE_S}
