"""Versions that retention must keep because a live rollout holds them or an open partial names them
(invariant 11).

Dispatch tracks the open partials and saves that state every few seconds (`kept.py`). A partial that
began after the last save began under a version that its rollout held since then. Those versions
stay too, whatever happens to the rollout, also while dispatch is down.

All times are of this process's own clock, taken when a status is read. The clocks of rollouts
decide nothing, so a rollout whose clock is an hour ahead does not unpin versions of the others.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollstream.consumers.dispatch.persistence import read_persisted_state
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Position, RolloutStatus
from rollstream.streams.values import Version

LIVE_S = 60.0  # above any heartbeat timeout: a rollout silent for longer fetches the newest anyway
OVERLAP_S = 5.0  # two threads send status and partials: a partial may follow the next status


class HeldVersions:
    """Returns the versions that live rollouts hold, from the last `status` of every rollout."""

    def __init__(self, bus: Bus, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._bus, self._monotonic = bus, monotonic
        self._reader = TopicReader(bus, "status", from_begin(bus, "status"))
        self._newest: dict[str, tuple[RolloutStatus, float]] = {}

    def __call__(self) -> set[Version]:
        """Versions of the rollouts whose last status was read within the last minute and whose
        health is not `leaving`; `status` is read to its end first.
        """
        now_s = self._monotonic()
        for batch in self._reader.batches_to(self._bus.end("status")):
            for received in batch:
                if isinstance(received.record, RolloutStatus):
                    self._observe(received.record, now_s)
        return {
            status.version
            for status, read_s in self._newest.values()
            if now_s - read_s < LIVE_S and status.health != "leaving"
        }

    def _observe(self, status: RolloutStatus, now_s: float) -> None:
        self._newest[status.rollout] = status, now_s


@dataclass(slots=True)
class _VersionHold:
    """A version that a rollout held: when the rollout was first seen without it, and the ends of
    `partials` `OVERLAP_S` later. A state of dispatch saved at or after these ends covers all
    partials of that version by that rollout.
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
    """Versions to keep under `keep_version`, where a partial can only be resumed under its own
    version. Memory: a few numbers per rollout and version held since dispatch saved its state.
    """

    def __init__(
        self, bus: Bus, store: ObjectStore, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(bus, monotonic)
        self._store = store
        self._holds: dict[tuple[str, Version], _VersionHold] = {}

    def __call__(self) -> set[Version]:
        """The versions of `HeldVersions`, those that open partials name, and those under which a
        partial may have begun that dispatch's saved state does not cover.
        """
        held = super().__call__()
        self._end_holds(self._monotonic())
        kept = read_persisted_state(self._store)
        where = kept.where().get("partials", {}) if kept else {}
        self._holds = {
            key: hold for key, hold in self._holds.items() if not (kept and hold.is_known(where))
        }
        named = (chain.version for _, chain in kept.chains) if kept else ()
        return {*held, *(v for _, v in self._holds), *(v for v in named if v is not None)}

    def _observe(self, status: RolloutStatus, now_s: float) -> None:
        super()._observe(status, now_s)
        self._holds[status.rollout, status.version] = _VersionHold()

    def _end_holds(self, now_s: float) -> None:
        """Record when versions stopped being held; `OVERLAP_S` after that, record the present ends
        of `partials`.
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
