"""The state of a run as all observers show it, so they print the same counts; without I/O. Its size
is bounded for any run.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec

from rollstream.look.monitor.groups import GroupTracker
from rollstream.look.monitor.samples import RecentSamples
from rollstream.look.monitor.sessions import RunSessions
from rollstream.storage.skipped_rows import SkippedRecord
from rollstream.storage.terms import restarts_of
from rollstream.streams.records import (
    Admitted,
    Annotation,
    Applied,
    GroupClosed,
    Opened,
    Prompt,
    Record,
    RelayStatus,
    RolloutStatus,
    StepDone,
    Superseded,
    Take,
    Trajectory,
    WeightsAnnounced,
)
from rollstream.streams.values import Version

if TYPE_CHECKING:
    from rollstream.consumers.dispatch.policy import MoveSummary
    from rollstream.storage.archive.segments import Hole

# Dispatch records in it: repack moves and foreign records.
MOVES_FILE = "moves.jsonl"
# Dispatch counts foreign records of these (`foreign_line`); the state ignores others.
FOREIGN_TOPICS = ("partials", "status", "applied")


# The role `prompts` records in it the rows of the data set that it skips.
PROMPTS_FILE = "prompts.jsonl"


class RequestMove(msgspec.Struct, frozen=True):
    """At `time_s` (seconds since the epoch) dispatch asked the rollout `source` to give up
    `requests` running trajectories, which continue on `destination`. Planning took `plan_s`
    seconds.
    """

    time_s: float
    source: str
    destination: str
    requests: int
    plan_s: float = 0.0


def move_line(move: "MoveSummary", plan_s: float, time_s: float) -> dict[str, Any]:
    record = RequestMove(time_s, move.source, move.destination, move.requests, plan_s)
    return msgspec.to_builtins(record)


def foreign_line(counts: Mapping[str, int], time_s: float) -> dict[str, Any]:
    """Returns the foreign line of `moves.jsonl`: foreign records by topic that dispatch refused
    since the previous line. No process of this run writes them, as values are out of bounds, or a
    rollout or relay never took its term.
    """
    return {"time_s": time_s, "foreign": dict(counts)}


def skipped_line(records: Iterable[SkippedRecord], time_s: float) -> dict[str, Any]:
    return {"time_s": time_s, "skipped_rows": [msgspec.to_builtins(record) for record in records]}


def parse_moves(lines: Iterable[Mapping[str, Any]]) -> list[RequestMove]:
    return [move for line in lines if (move := parse_move(line)) is not None]


def parse_move(line: Mapping[str, Any]) -> RequestMove | None:
    try:
        return msgspec.convert({k: v for k, v in line.items() if v is not None}, RequestMove)
    except msgspec.ValidationError:
        return None


# Of each rollout: ten seconds, over which speed and idle share are means.
HEARTBEATS_KEPT = 20
# Enough for the small charts of `rollstream top`.
STEPS_KEPT = 240
ROLLOUTS_KEPT = 1024
# Heartbeats are read later than they were sent, but no later than this.
CLOCK_S = 4.0
VERSIONS_KEPT = 64
# Evaluations, and supervisor events.
LINES_KEPT = 240
PROMPTS_KEPT = 4096
MOVES_KEPT = 1024
TERMS_KEPT = 8192
HOLES_KEPT = 64
# In a fork `rollstream fork` itself held the first term of these roles, so their second term is no
# restart.
FORKED_ROLES = ("trainer", "prompts")
# Names of processes without a term begin with one of these.
TERMLESS = ("eval", "scorer-")


@dataclass(frozen=True, slots=True)
class DeadLetters:
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class ArchiveBacklog:
    """The archive backlog of one topic; `oldest_s` is in seconds since the epoch."""

    records: int
    oldest_s: float


@dataclass(slots=True)
class RunState:
    """A completion must be applied after the admission of its group (`feed.py` does so). Applying a
    record twice changes only counts and histograms.
    """

    groups: GroupTracker = field(default_factory=GroupTracker)
    samples: RecentSamples = field(default_factory=RecentSamples)
    steps: deque[StepDone] = field(default_factory=lambda: deque[StepDone](maxlen=STEPS_KEPT))
    rollouts: dict[str, deque[RolloutStatus]] = field(
        default_factory=dict[str, deque[RolloutStatus]]
    )
    """The last heartbeats of each in its newest term."""
    weights: WeightsAnnounced | None = None
    announced: OrderedDict[Version, str] = field(default_factory=OrderedDict[Version, str])
    """Hashes of their manifests."""
    applied: dict[str, Applied] = field(default_factory=dict[str, Applied])
    prompts: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])
    """Publication times of groups that are not admitted yet."""
    epochs: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])
    """Pass over the prompts of the newest published groups, from 0."""
    evaluations: deque[dict[str, Any]] = field(
        default_factory=lambda: deque[dict[str, Any]](maxlen=LINES_KEPT)
    )
    events: deque[dict[str, Any]] = field(
        default_factory=lambda: deque[dict[str, Any]](maxlen=LINES_KEPT)
    )
    moves: deque[RequestMove] = field(default_factory=lambda: deque[RequestMove](maxlen=MOVES_KEPT))
    skipped_rows: tuple[SkippedRecord, ...] = ()
    foreign: Counter[str] = field(default_factory=Counter[str])
    terms: dict[str, int] = field(default_factory=dict[str, int])
    """Newest, of each single-holder role and each rollout, if above 1."""
    # The relays of a run share one sequence of terms, so a term does not give the restarts of its
    # relay.
    relays: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Newest term, and number of restarts."""
    restart_times: deque[tuple[str, float]] = field(
        default_factory=lambda: deque[tuple[str, float]](maxlen=LINES_KEPT)
    )
    """Of single-holder roles and rollouts, as far as new terms show them."""
    sessions: RunSessions = field(default_factory=RunSessions)
    deaths: Counter[str] = field(default_factory=Counter[str])
    """By role, as far as a supervisor recorded them."""
    is_fork: bool = False
    began_s: float | None = None
    newest_s: dict[str, float] = field(default_factory=dict[str, float])
    """Append time of each topic's newest record."""
    live_s: float | None = None
    """The observer's time while it applies records soon after their append, else None."""
    heard_s: float | None = None
    """When the observer last read a record soon after its append."""
    clock_offsets: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds to add to a rollout's times, where its clock differs from the observer's."""
    dead_letters: dict[str, DeadLetters] = field(default_factory=dict[str, DeadLetters])
    unarchived: Mapping[str, ArchiveBacklog] = field(default_factory=dict[str, ArchiveBacklog])
    unreadable: int = 0
    holes: list[str] = field(default_factory=list[str])
    is_tail: bool = False
    """The counts do not cover the start of the run."""

    def apply(self, record: Record, time_s: float = 0.0) -> None:
        """Appended at `time_s`; records of other kinds are ignored."""
        match record:
            case Admitted():
                self.groups.admit(record, time_s)
                self._drop_prompts()
            case Take():
                self.samples.take(record)
                for members in record.groups:
                    self.groups.end(members.group, "trained", time_s)
            case Superseded():
                self.samples.supersede(record)
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
            case Opened():
                if record.term > self.terms.get(record.role, 1) + (record.role in self._forked()):
                    self.restart_times.append((record.role, time_s))
                self.apply_term(record.role, record.term)
            case RolloutStatus():
                self.apply_term(record.rollout, record.term)
                self._beat(record)
            case RelayStatus():
                self._relay(record)
            case Applied():
                self.apply_term(record.rollout, record.rollout_term)
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
        """Applies the evaluation of `eval.jsonl`; it replaces an earlier line of its step; one
        without a step is ignored.
        """
        if isinstance(line.get("step"), int):
            lines = [
                *(earlier for earlier in self.evaluations if earlier["step"] != line["step"]),
                line,
            ]
            self.evaluations.clear()
            self.evaluations.extend(sorted(lines, key=lambda earlier: earlier["step"]))

    def apply_event(self, line: dict[str, Any]) -> None:
        """Applies the event of `supervisor.jsonl`; a line without a time is ignored."""
        if isinstance(line.get("time_s"), int | float):
            self.events.append(line)
            self.sessions.apply(line)
            self.deaths[str(line.get("role"))] += line.get("event") == "death"

    def apply_move(self, line: dict[str, Any]) -> None:
        """Applies the move of `moves.jsonl`; other lines are ignored."""
        counts = line.get("foreign")
        if isinstance(counts, dict):
            for topic, number in cast(dict[str, object], counts).items():
                if topic in FOREIGN_TOPICS and isinstance(number, int):
                    self.foreign[topic] += number
        move = parse_move(line)
        if move is not None:
            self.moves.append(move)

    def apply_prompts(self, line: dict[str, Any]) -> None:
        """Applies the prompts of `prompts.jsonl`; it replaces the one before; others
        are ignored.
        """
        try:
            records = msgspec.convert(line.get("skipped_rows"), tuple[SkippedRecord, ...])
        except msgspec.ValidationError:
            return
        self.skipped_rows = records

    def apply_hole(self, hole: "Hole") -> None:
        """A part of the log that cannot be read."""
        # Truncation without an archive is no fault, but the counts then lack the start of the run.
        # Records archived twice are no fault either: each is read once.
        if hole.reason == "truncated":
            self.is_tail = True
        elif hole.reason != "archived twice" and len(self.holes) < HOLES_KEPT:
            self.holes.append(str(hole))

    def apply_term(self, role: str, term: int) -> None:
        """Applies the term of a single-holder role or a rollout; 1 is the first."""
        if term > self.terms.get(role, 1):
            self.terms[role] = term
            if len(self.terms) > TERMS_KEPT:
                del self.terms[next(iter(self.terms))]

    def restarts(self) -> dict[str, int]:
        """Terms after the first, without the starts by a later session of `rollstream run`.
        Processes without terms count their deaths, which only `rollstream run` records.
        """
        forked = self._forked()
        counts = {r: restarts_of(term) - (r in forked) for r, term in self.terms.items()}
        counts |= {relay: restarts for relay, (_, restarts) in self.relays.items()}
        counts = {
            role: max(number - self.sessions.resumed(role), min(number, self.deaths[role]))
            for role, number in counts.items()
        }
        counts |= {role: n for role, n in self.deaths.items() if role.startswith(TERMLESS)}
        return {role: restarts for role, restarts in sorted(counts.items()) if restarts > 0}

    def run_s(self, begin_s: float, end_s: float, started_s: float | None = None) -> float:
        return self.sessions.run_s(begin_s, end_s, (done.time_s for done in self.steps), started_s)

    def _forked(self) -> tuple[str, ...]:
        return FORKED_ROLES if self.is_fork else ()

    def _step_done(self, done: StepDone) -> None:
        # A step is repeated after a crash.
        while self.steps and self.steps[-1].step >= done.step:
            self.steps.pop()
        self.steps.append(done)

    def _beat(self, status: RolloutStatus) -> None:
        beats = self.rollouts.setdefault(status.rollout, deque(maxlen=HEARTBEATS_KEPT))
        if beats and status.term > beats[-1].term:
            self.restart_times.append((status.rollout, status.time_s))
            beats.clear()
        # A heartbeat of an older term or time is ignored.
        if not beats or (status.term, status.time_s) > (beats[-1].term, beats[-1].time_s):
            beats.append(status)
            self._compare_clocks(status)
        # The rollout with the oldest heartbeat goes.
        if len(self.rollouts) > ROLLOUTS_KEPT:
            oldest = min(self.rollouts, key=lambda name: self.rollouts[name][-1].time_s)
            del self.rollouts[oldest]
            self.clock_offsets.pop(oldest, None)

    def _compare_clocks(self, status: RolloutStatus) -> None:
        offset_s = 0.0 if self.live_s is None else self.live_s - status.time_s
        if abs(offset_s) > CLOCK_S:
            self.clock_offsets[status.rollout] = offset_s
        elif self.live_s is not None:
            self.clock_offsets.pop(status.rollout, None)

    def _relay(self, status: RelayStatus) -> None:
        term, restarts = self.relays.get(status.relay, (status.term, 0))
        if status.term >= term:
            self.relays[status.relay] = status.term, restarts + (status.term > term)
            if len(self.relays) > TERMS_KEPT:
                del self.relays[next(iter(self.relays))]

    def _applied(self, record: Applied) -> None:
        newest = self.applied.get(record.rollout)
        now = (record.rollout_term, record.time_s)
        if newest is None or now >= (newest.rollout_term, newest.time_s):
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
        while self.prompts:
            first = next(iter(self.prompts))
            # Prompts arrive in the order of their groups, so the first one that stays ends the
            # search.
            if first > self.groups.newest and len(self.prompts) <= PROMPTS_KEPT:
                return
            del self.prompts[first]
