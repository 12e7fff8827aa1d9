"""Versions that retention must keep because a living rollout holds them, or an open partial names
them (invariant 11).

Which partials are open dispatch knows; it keeps that every few seconds (`kept.py`). What a rollout
began since then it began under a version that it held since then: those stay too, whatever became
of the rollout, also while dispatch is away.
"""

from consumers.dispatch.kept import read_kept
from storage.objects import ObjectStore
from streams.bus import Bus
from streams.reader import TopicReader, from_begin
from streams.records import RolloutStatus, Version

LIVE_S = 60.0  # a rollout silent for longer than any heartbeat timeout refetches the newest anyway
OVERLAP_S = 5.0  # between a status and a partial of the same moment, which are read one by one


class HeldVersions:
    """Follows `status`; knows what every rollout said last."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._reader = TopicReader(bus, "status", from_begin(bus, "status"))
        self._newest: dict[str, RolloutStatus] = {}

    def __call__(self) -> set[Version]:
        """Versions held by rollouts that spoke in the minute before the last word of
        any of them.
        """
        for received in self._reader.read_to(self._bus.end("status")):
            if isinstance(received.record, RolloutStatus):
                self._note(received.record)
        said = self._newest.values()
        last_s = max((status.time_s for status in said), default=0.0)
        recent = [status for status in said if last_s - status.time_s < LIVE_S]
        return {status.version for status in recent if status.health != "leaving"}

    def _note(self, status: RolloutStatus) -> None:
        self._newest[status.rollout] = status


class PinnedVersions(HeldVersions):
    """Under `keep_version`, where a partial can only go on under its own version. Memory: a number
    per rollout and version held since dispatch kept its state.
    """

    def __init__(self, bus: Bus, store: ObjectStore) -> None:
        super().__init__(bus)
        self._store = store
        self._held_s: dict[tuple[str, Version], float] = {}

    def __call__(self) -> set[Version]:
        """Those of `HeldVersions`, those that open partials name, and those under which a partial
        may have begun that dispatch has not kept.
        """
        held, kept = super().__call__(), read_kept(self._store)
        known_s = dict(kept.heard_s) if kept else {}
        since_s = max(known_s.values(), default=0.0) - LIVE_S  # of who was unknown then
        self._held_s = {
            (rollout, version): said_s
            for (rollout, version), said_s in self._held_s.items()
            if said_s >= known_s.get(rollout, since_s) - OVERLAP_S
        }
        named = (chain.version for _, chain in kept.chains) if kept else ()
        return {*held, *(v for _, v in self._held_s), *(v for v in named if v is not None)}

    def _note(self, status: RolloutStatus) -> None:
        super()._note(status)
        self._held_s[status.rollout, status.version] = status.time_s
