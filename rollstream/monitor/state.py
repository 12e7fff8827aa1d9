"""The monitored state of a run: a fold over records and metrics lines, without I/O or clock.

Its size is bounded however old and large the run is: it holds the last steps, heartbeats and
trajectories, the open groups, and counts.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollstream.monitor.groups import GroupTracker
from rollstream.monitor.moves import RequestMove, parse_move
from rollstream.monitor.samples import RecentSamples
from rollstream.streams.records import (
    Admitted,
    Annotation,
    Applied,
    GroupClosed,
    Prompt,
    Record,
    RolloutStatus,
    StepDone,
    Superseded,
    Take,
    Trajectory,
    WeightsAnnounced,
)
from rollstream.streams.values import Version

HEARTBEATS_KEPT = 20  # ten seconds of heartbeats, behind the mean speed and idle share
STEPS_KEPT = 240  # length of the sparklines
ROLLOUTS_KEPT = 1024
VERSIONS_KEPT = 64
LINES_KEPT = 240  # evaluations, and supervisor events
PROMPTS_KEPT = 4096
MOVES_KEPT = 1024


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Dead letters of one topic, and the reason of the newest."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class ArchiveBacklog:
    """Records of one topic that the archive has not committed, and the time of the oldest."""

    records: int
    oldest_s: float


@dataclass(slots=True)
class RunState:
    """Applies records of any topic; applying one twice changes at most a count of repeats."""

    groups: GroupTracker = field(default_factory=GroupTracker)
    samples: RecentSamples = field(default_factory=RecentSamples)
    steps: deque[StepDone] = field(default_factory=lambda: deque[StepDone](maxlen=STEPS_KEPT))
    rollouts: dict[str, deque[RolloutStatus]] = field(
        default_factory=dict[str, deque[RolloutStatus]]
    )
    """Last heartbeats of each rollout in its newest term."""
    weights: WeightsAnnounced | None = None
    announced: OrderedDict[Version, str] = field(default_factory=OrderedDict[Version, str])
    """Announced versions and the hashes of their manifests."""
    applied: dict[str, Applied] = field(default_factory=dict[str, Applied])
    """Newest `Applied` record of each rollout."""
    prompts: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])
    """Published, not yet admitted groups and their publication times."""
    epochs: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])
    """Pass over the prompts, from 0, of the newest published groups."""
    evaluations: deque[dict[str, Any]] = field(
        default_factory=lambda: deque[dict[str, Any]](maxlen=LINES_KEPT)
    )
    events: deque[dict[str, Any]] = field(
        default_factory=lambda: deque[dict[str, Any]](maxlen=LINES_KEPT)
    )
    """Events of the supervisor."""
    moves: deque[RequestMove] = field(default_factory=lambda: deque[RequestMove](maxlen=MOVES_KEPT))
    """Repack moves, the newest last."""
    deaths: int = 0
    began_s: float | None = None
    """Time of the first kept record."""
    newest_s: dict[str, float] = field(default_factory=dict[str, float])
    """Append time of each topic's newest record."""
    dead_letters: dict[str, DeadLetters] = field(default_factory=dict[str, DeadLetters])
    unarchived: Mapping[str, ArchiveBacklog] = field(default_factory=dict[str, ArchiveBacklog])
    unreadable: int = 0
    is_tail: bool = False
    """Counts do not cover the start of the run."""

    def apply(self, record: Record, time_s: float = 0.0) -> None:
        """Apply one record that was appended at `time_s`."""
        match record:
            case Admitted():
                self.groups.admit(record, time_s)
                self._drop_prompts()
            case Take():
                self.samples.take(record)
                for members in record.groups:
                    self.groups.end(members.group, "trained", time_s)
            case Superseded():
                for group in record.poisoned:
                    self.groups.supersede(group)
            case GroupClosed():
                self.groups.end(record.group, record.reason, time_s)
            case StepDone():
                self._step_done(record)
            case Trajectory():
                is_repeat = not self.samples.finish(record)
                self.groups.finish(record, time_s, is_repeat)
            case Annotation():
                self.groups.annotate(record, time_s)
                self.samples.annotate(record)
            case RolloutStatus():
                self._beat(record)
            case Applied():
                self._applied(record)
            case WeightsAnnounced():
                self._announce(record)
            case Prompt():
                self.prompts[record.group] = time_s
                self._drop_prompts()
                self.epochs[record.group] = record.epoch
                if len(self.epochs) > PROMPTS_KEPT:
                    self.epochs.popitem(last=False)
            case _:
                pass

    def apply_evaluation(self, line: dict[str, Any]) -> None:
        """Apply a line of `eval.jsonl`; a line without a step is ignored."""
        if isinstance(line.get("step"), int):
            lines = [*(one for one in self.evaluations if one["step"] != line["step"]), line]
            self.evaluations.clear()
            self.evaluations.extend(sorted(lines, key=lambda one: one["step"]))

    def apply_event(self, line: dict[str, Any]) -> None:
        """Apply a line of `supervisor.jsonl`."""
        if isinstance(line.get("time_s"), int | float):
            self.events.append(line)
            self.deaths += line.get("event") == "death"

    def apply_move(self, line: dict[str, Any]) -> None:
        """Apply a line of `moves.jsonl`; a line without a move is ignored."""
        move = parse_move(line)
        if move is not None:
            self.moves.append(move)

    def _step_done(self, done: StepDone) -> None:
        while self.steps and self.steps[-1].step >= done.step:  # repeated after a crash
            self.steps.pop()
        self.steps.append(done)

    def _beat(self, status: RolloutStatus) -> None:
        beats = self.rollouts.setdefault(status.rollout, deque(maxlen=HEARTBEATS_KEPT))
        if beats and status.term > beats[-1].term:
            beats.clear()
        if not beats or (status.term, status.time_s) > (beats[-1].term, beats[-1].time_s):
            beats.append(status)
        if len(self.rollouts) > ROLLOUTS_KEPT:  # evict the rollout with the oldest heartbeat
            del self.rollouts[min(self.rollouts, key=lambda name: self.rollouts[name][-1].time_s)]

    def _applied(self, record: Applied) -> None:
        known = self.applied.get(record.rollout)
        now = (record.rollout_term, record.time_s)
        if known is None or now >= (known.rollout_term, known.time_s):
            self.applied[record.rollout] = record
        if len(self.applied) > ROLLOUTS_KEPT:
            del self.applied[min(self.applied, key=lambda name: self.applied[name].time_s)]

    def _announce(self, record: WeightsAnnounced) -> None:
        if self.weights is None or self.weights.version < record.version:
            self.weights = record
        self.announced[record.version] = record.manifest_hash
        if len(self.announced) > VERSIONS_KEPT:
            self.announced.popitem(last=False)

    def _drop_prompts(self) -> None:
        """Drop admitted prompts, and the oldest above the bound; prompts arrive in order."""
        while self.prompts:
            first = next(iter(self.prompts))
            if first > self.groups.newest and len(self.prompts) <= PROMPTS_KEPT:
                return
            del self.prompts[first]
