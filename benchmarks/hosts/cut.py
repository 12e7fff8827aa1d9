"""What a cut of the link cost the rollouts behind it, from the log and from samples of their
metrics (`testbed/hosts/run.py`). Pure functions.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollstream.storage.archive.segments import LogRecord
from rollstream.streams.records import Assignment, Partial, Trajectory
from testbed.hosts.run import RolloutSample

Samples = Mapping[str, Sequence[RolloutSample]]
FULL = 0.98  # of all slots: a slot is empty from the end of one answer to the next poll


@dataclass(frozen=True)
class Cut:
    """Begin and end of the cut on the wall clock."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def slot_speed(samples: Iterable[RolloutSample]) -> float:
    """Returns the tokens per second of one running slot."""
    ordered = list(samples)
    tokens = ordered[-1].tokens - ordered[0].tokens
    busy_s = sum((b.time_s - a.time_s) * (a.running + b.running) / 2 for a, b in pairwise(ordered))
    return tokens / busy_s


def queued_tokens(log: Iterable[LogRecord], at_s: float) -> dict[str, list[int]]:
    """Returns by rollout the tokens that each answer still lacked at `at_s`, of the answers that it
    had been assigned by then and that were not complete. `log` are the records of `assignments`,
    `partials` and `trajectories`, the later ones too: they say how long each answer became.
    """
    assigned: dict[str, Assignment] = {}
    generated: dict[str, int] = {}
    length: dict[str, int] = {}
    complete: set[str] = set()
    for one in log:
        record, is_before = one.record, one.timestamp_ms / 1000 <= at_s
        if isinstance(record, Trajectory):
            length[record.trajectory] = record.spans[-1].end if record.spans else 0
            if is_before:
                complete.add(record.trajectory)
        elif isinstance(record, Assignment) and is_before:
            known = assigned.get(record.trajectory)
            if known is None or record.attempt >= known.attempt:
                assigned[record.trajectory] = record
        elif isinstance(record, Partial) and is_before and record.spans:
            known = generated.get(record.trajectory, 0)
            generated[record.trajectory] = max(known, record.spans[-1].end)
    found: dict[str, list[int]] = {}
    for name, assignment in assigned.items():
        if name not in complete and name in length and assignment.kind != "release":
            left = max(0, length[name] - generated.get(name, 0))
            found.setdefault(assignment.rollout, []).append(left)
    return found


def possible_tokens(left: Sequence[int], slots: int, speed: float, seconds: float) -> float:
    """Returns the tokens that `slots` slots of this speed can generate of these answers within the
    time, the longest first, each answer in one slot.
    """
    free_s = [0.0] * slots
    total = 0.0
    for tokens in sorted(left, reverse=True):
        at_s = heapq.heappop(free_s)
        total += min(tokens, max(0.0, seconds - at_s) * speed)
        heapq.heappush(free_s, at_s + tokens / speed)
    return total


def idle_share(samples: Samples, log: Sequence[LogRecord], cut: Cut, before_s: float) -> float:
    """Returns the slot-seconds of the cut in which slots were idle although their rollout had work
    for them, over all slot-seconds of the cut. Speeds are those of the `before_s` seconds before.
    """
    queued = queued_tokens(log, cut.begin_s)
    idle_s = all_s = 0.0
    for host, found in samples.items():
        speed = slot_speed(s for s in found if cut.begin_s - before_s <= s.time_s <= cut.begin_s)
        slots = int(found[-1].slots)
        during = [s for s in found if cut.begin_s <= s.time_s <= cut.end_s]
        possible = possible_tokens(queued.get(f"rollout-{host}", []), slots, speed, cut.seconds)
        idle_s += max(0.0, possible - (during[-1].tokens - during[0].tokens)) / speed
        all_s += slots * cut.seconds
    return idle_s / all_s


def back_s(samples: Samples, cut: Cut) -> float:
    """Returns the seconds from the end of the cut until the slots of all hosts run; infinite if
    that is not in the samples.
    """
    moments = sorted(s.time_s for found in samples.values() for s in found)
    for moment in moments:
        if moment <= cut.end_s:
            continue
        newest = [[s for s in found if s.time_s <= moment][-1:] for found in samples.values()]
        present = [one for found in newest for one in found if one.time_s > cut.end_s]
        slots = sum(found[-1].slots for found in samples.values())
        if sum(one.running for one in present) >= FULL * slots:
            return moment - cut.end_s
    return float("inf")
