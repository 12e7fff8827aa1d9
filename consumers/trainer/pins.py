"""Versions that retention must keep because a living rollout holds them, or an open partial names
them (invariant 11).

Which partials are open dispatch knows; it keeps that every few seconds (`kept.py`). What a rollout
began since then it began under a version that it held since then: those stay too, whatever became
of the rollout, also while dispatch is away.

All times are of this process's own clock, when a status was read: the clocks of rollouts decide
nothing, so one that runs an hour ahead does not unpin what the others hold.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from consumers.dispatch.kept import read_kept
from storage.objects import ObjectStore
from streams.bus import Bus
from streams.reader import TopicReader, from_begin
from streams.records import Position, RolloutStatus, Version

LIVE_S = 60.0  # a rollout silent for longer than any heartbeat timeout refetches the newest anyway
OVERLAP_S = 5.0  # a partial may land after the next version's status: two threads send them


class HeldVersions:
    """Follows `status`; knows the last status of every rollout."""

    def __init__(self, bus: Bus, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._bus, self._monotonic = bus, monotonic
        self._reader = TopicReader(bus, "status", from_begin(bus, "status"))
        self._newest: dict[str, tuple[RolloutStatus, float]] = {}

    def __call__(self) -> set[Version]:
        """Versions held by rollouts whose last status was read within the last minute and does not
        say `leaving`; `status` is read to its end first.
        """
        now_s = self._monotonic()
        for batch in self._reader.batches_to(self._bus.end("status")):
            for received in batch:
                if isinstance(received.record, RolloutStatus):
                    self._note(received.record, now_s)
        return {
            status.version
            for status, read_s in self._newest.values()
            if now_s - read_s < LIVE_S and status.health != "leaving"
        }

    def _note(self, status: RolloutStatus, now_s: float) -> None:
        self._newest[status.rollout] = status, now_s


@dataclass(slots=True)
class _Hold:
    """A version that a rollout held: when it was first seen to hold it no more, and where
    `partials` ended a while after that. Dispatch that kept its state from there on knows all
    partials of it.
    """

    ended_s: float | None = None
    partials: Mapping[int, int] | None = None

    def is_known(self, kept: Mapping[int, Position]) -> bool:
        return self.partials is not None and all(
            partition in kept and kept[partition].offset >= end
            for partition, end in self.partials.items()
            if end
        )


class PinnedVersions(HeldVersions):
    """Under `keep_version`, where a partial can only go on under its own version. Memory: a few
    numbers per rollout and version held since dispatch kept its state.
    """

    def __init__(
        self, bus: Bus, store: ObjectStore, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(bus, monotonic)
        self._store = store
        self._holds: dict[tuple[str, Version], _Hold] = {}

    def __call__(self) -> set[Version]:
        """Those of `HeldVersions`, those that open partials name, and those under which a partial
        may have begun that dispatch has not kept.
        """
        held = super().__call__()
        self._end_holds(self._monotonic())
        kept = read_kept(self._store)
        where = kept.where().get("partials", {}) if kept else {}
        self._holds = {
            key: hold for key, hold in self._holds.items() if not (kept and hold.is_known(where))
        }
        named = (chain.version for _, chain in kept.chains) if kept else ()
        return {*held, *(v for _, v in self._holds), *(v for v in named if v is not None)}

    def _note(self, status: RolloutStatus, now_s: float) -> None:
        super()._note(status, now_s)
        self._holds[status.rollout, status.version] = _Hold()

    def _end_holds(self, now_s: float) -> None:
        """Note which are held no more, and for those that have not been for a while how far the log
        of partials reaches now.
        """
        ends: Mapping[int, int] | None = None
        for (rollout, version), hold in self._holds.items():
            status, read_s = self._newest[rollout]
            is_held = status.version == version and status.health != "leaving"
            if hold.ended_s is None and (not is_held or now_s - read_s >= LIVE_S):
                hold.ended_s = now_s
            if hold.ended_s is None or hold.partials is not None:
                continue
            if now_s - hold.ended_s >= OVERLAP_S:
                ends = self._bus.end("partials") if ends is None else ends
                hold.partials = ends
