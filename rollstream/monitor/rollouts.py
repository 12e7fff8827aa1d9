"""State and speed of each rollout at one moment. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollstream.monitor.state import RunState
from rollstream.streams.records import Applied, RolloutStatus
from rollstream.streams.values import Version

SILENT_S = 5.0  # ten heartbeats; a loop without progress for as long is `stalled`


@dataclass(frozen=True, slots=True)
class RolloutSnapshot:
    """One rollout. `verified` is False if its weights were not checked, or are not the announced
    ones.
    """

    name: str
    running: int
    slots: int
    waiting: int
    kv_used: int
    kv_capacity: int
    version: int
    verified: bool
    tokens_per_s: float
    idle_share: float
    silent_s: float
    state: str
    queued: int = 0
    """Part of `waiting` that was not submitted to the engine yet."""

    def is_alive(self) -> bool:
        return self.state not in ("silent", "leaving")

    def severity_key(self) -> tuple[bool, bool, float]:
        """Sort key that puts the worst first: silent, then unverified, then idle rollouts."""
        return (self.state != "silent", self.verified, -self.idle_share)


def rollout_snapshots(state: RunState, now_s: float) -> tuple[RolloutSnapshot, ...]:
    """Returns all rollouts by name; numbers in names sort numerically."""
    lines = (
        _snapshot(beats, state.applied.get(name), state.announced, now_s)
        for name, beats in state.rollouts.items()
    )
    return tuple(sorted(lines, key=lambda line: _natural(line.name)))


def worst_first(lines: Sequence[RolloutSnapshot]) -> list[RolloutSnapshot]:
    """Returns the rollouts sorted by `severity_key`; equals keep their order."""
    return sorted(lines, key=lambda line: line.severity_key())


def _snapshot(
    beats: Sequence[RolloutStatus],
    applied: Applied | None,
    announced: Mapping[Version, str],
    now_s: float,
) -> RolloutSnapshot:
    first, status = beats[0], beats[-1]
    silent_s = max(0.0, now_s - status.time_s)
    is_silent = silent_s > SILENT_S and status.health != "leaving"
    seconds = max(1e-9, status.time_s - first.time_s)
    tokens = status.tokens_total - first.tokens_total
    return RolloutSnapshot(
        name=status.rollout,
        running=status.running,
        slots=status.slots,
        waiting=status.waiting,
        kv_used=status.kv_used,
        kv_capacity=status.kv_capacity,
        version=status.version.number,
        verified=status.verified and _is_announced(applied, announced),
        tokens_per_s=tokens / seconds if len(beats) > 1 else status.tokens_per_s,
        idle_share=min(1.0, (status.idle_s - first.idle_s) / seconds),
        silent_s=silent_s,
        state=_state(status, is_silent),
        queued=status.queued,
    )


def _state(status: RolloutStatus, is_silent: bool) -> str:
    if is_silent:
        return "silent"
    return "stalled" if status.stalled_s > SILENT_S else status.health


def _is_announced(applied: Applied | None, announced: Mapping[Version, str]) -> bool:
    """True unless the served hash and the announced hash are both known and differ."""
    return applied is None or announced.get(applied.version, applied.hash) == applied.hash


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """`rollout-2` before `rollout-10`."""
    parts: list[str] = []
    for character in name:
        if parts and parts[-1][-1].isdecimal() == character.isdecimal():
            parts[-1] += character
        else:
            parts.append(character)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)
