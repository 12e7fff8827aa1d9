"""What an onlooker knows of a run: a fold over records and lines, without I/O and without a clock.

Everything in it is bounded, however old and large the run is: the last steps, heartbeats,
trajectories; what is open; counts.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollstream.live.groups import Groups
from rollstream.live.moves import Moved, move_of
from rollstream.live.samples import Samples
from streams.records import (
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
    Version,
    WeightsAnnounced,
)

BEATS_KEPT = 20  # ten seconds of heartbeats: speed and idle share are means over them
STEPS_KEPT = 240  # of the history that the view draws
ROLLOUTS_KEPT = 1024
VERSIONS_KEPT = 64
LINES_KEPT = 240  # evaluations, and events of the supervisor
PROMPTS_KEPT = 4096
MOVES_KEPT = 1024


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Of one `<topic>.dead`: how many are kept, and why the newest could not be read."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unarchived:
    """Of one topic: records that the archive has not committed, and when the oldest came."""

    records: int
    oldest_s: float


@dataclass(slots=True)
class RunState:
    """Apply records of any topic; applying one twice changes no more than a count of repeats."""

    groups: Groups = field(default_factory=Groups)
    samples: Samples = field(default_factory=Samples)
    steps: deque[StepDone] = field(default_factory=lambda: deque[StepDone](maxlen=STEPS_KEPT))
    rollouts: dict[str, deque[RolloutStatus]] = field(
        default_factory=dict[str, deque[RolloutStatus]]
    )
    """The last heartbeats of each rollout's newest term."""
    weights: WeightsAnnounced | None = None
    announced: OrderedDict[Version, str] = field(default_factory=OrderedDict[Version, str])
    """Believed versions and the hashes of their manifests."""
    applied: dict[str, Applied] = field(default_factory=dict[str, Applied])
    """What each rollout last said that it serves."""
    prompts: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])
    """Published groups and when."""
    epochs: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])
    """The passes over the prompts that the newest published groups belong to, from 0."""
    evaluations: deque[dict[str, Any]] = field(
        default_factory=lambda: deque[dict[str, Any]](maxlen=LINES_KEPT)
    )
    events: deque[dict[str, Any]] = field(
        default_factory=lambda: deque[dict[str, Any]](maxlen=LINES_KEPT)
    )
    """What the supervisor did."""
    moves: deque[Moved] = field(default_factory=lambda: deque[Moved](maxlen=MOVES_KEPT))
    """What dispatch asked rollouts to hand over, the newest last."""
    deaths: int = 0
    began_s: float | None = None
    """When the log began, as far as it is kept."""
    newest_s: dict[str, float] = field(default_factory=dict[str, float])
    """By topic, when its newest record was appended."""
    dead_letters: Mapping[str, DeadLetters] = field(default_factory=dict[str, DeadLetters])
    unarchived: Mapping[str, Unarchived] = field(default_factory=dict[str, Unarchived])
    unreadable: int = 0
    is_tail: bool = False
    """Counts do not reach back to the run's begin."""

    def apply(self, record: Record, time_s: float = 0.0) -> None:
        """Take one record into account; `time_s` is when it was appended."""
        match record:
            case Admitted():
                self.groups.admit(record, time_s)
                self._forget_prompts()
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
                self.groups.note(record, time_s)
                self.samples.note(record)
            case RolloutStatus():
                self._beat(record)
            case Applied():
                self._applied(record)
            case WeightsAnnounced():
                self._announce(record)
            case Prompt():
                self.prompts[record.group] = time_s
                self._forget_prompts()
                self.epochs[record.group] = record.epoch
                if len(self.epochs) > PROMPTS_KEPT:
                    self.epochs.popitem(last=False)
            case _:
                pass

    def apply_evaluation(self, line: dict[str, Any]) -> None:
        """A line of `eval.jsonl`; one without a step is none."""
        if isinstance(line.get("step"), int):
            lines = [*(one for one in self.evaluations if one["step"] != line["step"]), line]
            self.evaluations.clear()
            self.evaluations.extend(sorted(lines, key=lambda one: one["step"]))

    def apply_event(self, line: dict[str, Any]) -> None:
        """A line of `supervisor.jsonl`."""
        if isinstance(line.get("time_s"), int | float):
            self.events.append(line)
            self.deaths += line.get("event") == "death"

    def apply_move(self, line: dict[str, Any]) -> None:
        """A line of `moves.jsonl`; one that says no move is none."""
        move = move_of(line)
        if move is not None:
            self.moves.append(move)

    def _step_done(self, done: StepDone) -> None:
        while self.steps and self.steps[-1].step >= done.step:  # repeated after a crash
            self.steps.pop()
        self.steps.append(done)

    def _beat(self, status: RolloutStatus) -> None:
        beats = self.rollouts.setdefault(status.rollout, deque(maxlen=BEATS_KEPT))
        if beats and status.term > beats[-1].term:
            beats.clear()
        if not beats or (status.term, status.time_s) > (beats[-1].term, beats[-1].time_s):
            beats.append(status)
        if len(self.rollouts) > ROLLOUTS_KEPT:  # names come and go: the longest silent goes
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

    def _forget_prompts(self) -> None:
        """Those that were admitted, and the oldest beyond the bound; they come in order."""
        while self.prompts:
            first = next(iter(self.prompts))
            if first > self.groups.newest and len(self.prompts) <= PROMPTS_KEPT:
                return
            del self.prompts[first]
