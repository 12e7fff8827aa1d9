"""Repack: which rollouts move their last requests to which others, so that they become empty, pull
the newest weights and take new prompts. Pure (invariant 9).

Laminar (arXiv 2510.12633, section 5, Algorithm 1), per version, as best-fit decreasing: the largest
candidates stay and become destinations, and each smaller one goes whole into the fullest
destination that still takes it. So a destination never becomes a source, no request moves twice,
and as little as possible is moved. No destination is filled above its KV capacity or its decode
batch bound. The cost is n log n in a version's candidates: ten thousand rollouts are planned
between two decode steps.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollstream.streams.values import Version

DESTINATIONS_TRIED_MAX = 64  # for one source, fullest first, when the other bound is tight


@dataclass(frozen=True, slots=True)
class RolloutLoad:
    """The load of one rollout. `kv_previous` is its earlier KV use: a higher value means that its
    requests end and no others arrive. `gains`: once empty it would take work that it cannot take
    now. `ready` is False while it pulls, is not verified, or is in the middle of another move.
    """

    rollout: str
    version: Version
    running: int
    waiting: int
    kv_used: int
    kv_previous: int
    kv_capacity: int
    batch_max: int
    ready: bool = True
    gains: bool = True


@dataclass(frozen=True, slots=True)
class RepackMove:
    """All requests of `source` continue at `destination`."""

    source: str
    destination: str
    requests: int
    kv: int


def is_candidate(load: RolloutLoad) -> bool:
    """Whether the rollout is at the end of its KV life cycle: KV use below capacity and falling,
    nothing waiting, and a decode batch that more requests would hardly slow down.
    """
    return (
        load.ready
        and load.waiting == 0
        and 0 < load.running < load.batch_max
        and load.kv_used < min(load.kv_capacity, load.kv_previous)
    )


def plan_repack(loads: Iterable[RolloutLoad], keep_version: bool = True) -> tuple[RepackMove, ...]:
    """The moves; empty when no rollout would gain. With `keep_version` only between rollouts of one
    version (invariant 4). Ties go by name, so equal inputs give equal plans.
    """
    alike: dict[Version | None, list[RolloutLoad]] = {}
    for load in loads:
        if is_candidate(load):
            alike.setdefault(load.version if keep_version else None, []).append(load)
    return tuple(move for group in alike.values() for move in _pack(group))


def _pack(candidates: Sequence[RolloutLoad]) -> Iterator[RepackMove]:
    """Best-fit decreasing in the scarcer of KV and requests; the other bound is checked."""
    if len(candidates) < 2 or not any(load.gains for load in candidates):
        return
    kv = sum(c.kv_used for c in candidates) / sum(c.kv_capacity for c in candidates)
    requests = sum(c.running for c in candidates) / sum(c.batch_max for c in candidates)
    by_kv = kv >= requests
    # slack in the scarcer dimension, name, slack in the other
    bins: list[tuple[int, str, int]] = []
    for load in sorted(candidates, key=lambda c: _packing_key(c, by_kv)):
        first, second = _scarcer_first(load.kv_used, load.running, by_kv)
        at = _fullest_destination(bins, first, second) if load.gains else None
        if at is None:
            slack = load.kv_capacity - load.kv_used, load.batch_max - load.running
            mine = _scarcer_first(*slack, by_kv)
            insort(bins, (mine[0], load.rollout, mine[1]))
            continue
        slack_first, name, slack_second = bins.pop(at)
        insort(bins, (slack_first - first, name, slack_second - second))
        yield RepackMove(load.rollout, name, load.running, load.kv_used)


def _packing_key(load: RolloutLoad, by_kv: bool) -> tuple[bool, int, int, str]:
    """Sort key, largest first. Rollouts that would not gain come first: they can only be
    destinations.
    """
    first, second = _scarcer_first(load.kv_used, load.running, by_kv)
    return load.gains, -first, -second, load.rollout


def _scarcer_first(kv: int, requests: int, by_kv: bool) -> tuple[int, int]:
    return (kv, requests) if by_kv else (requests, kv)


def _fullest_destination(
    bins: Sequence[tuple[int, str, int]], first: int, second: int
) -> int | None:
    """Index of the fullest bin that takes both sizes; None if none does."""
    begin = bisect_left(bins, (first, "", 0))
    for at in range(begin, min(begin + DESTINATIONS_TRIED_MAX, len(bins))):
        if bins[at][2] >= second:
            return at
    return None
