"""Folds a run's records and metrics lines into one `RunState`, without I/O.

`rollstream top`, the report, the warnings and `rollstream ls` all read this state, so they print
the same counts. Its size is bounded however old and large the run is: it holds the last steps,
heartbeats and trajectories, the open groups, the restarted roles, and counts.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec

from rollstream.monitor.groups import GroupTracker
from rollstream.monitor.samples import RecentSamples
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
    from rollstream.consumers.dispatch.moves import MoveSummary
    from rollstream.storage.archive.segments import Hole

MOVES_FILE = "moves.jsonl"
FOREIGN_TOPICS = ("partials", "status", "applied")


class RequestMove(msgspec.Struct, frozen=True):
    """States that dispatch moved `requests` requests from rollout `source` to `destination` at
    `time_s` (seconds since the epoch); planning took `plan_s` seconds.
    """

    time_s: float
    source: str
    destination: str
    requests: int
    plan_s: float = 0.0


def move_line(move: "MoveSummary", plan_s: float, time_s: float) -> dict[str, Any]:
    """Returns the move as a line of `moves.jsonl`."""
    found = RequestMove(time_s, move.source, move.destination, move.requests, plan_s)
    return msgspec.to_builtins(found)


def foreign_line(counts: Mapping[str, int], time_s: float) -> dict[str, Any]:
    """Returns a line of `moves.jsonl` that counts by topic the foreign records which dispatch
    refused since its previous such line. A record is foreign if no role of this run writes it.
    """
    return {"time_s": time_s, "foreign": dict(counts)}


def parse_moves(lines: Iterable[Mapping[str, Any]]) -> list[RequestMove]:
    """Returns the moves among the lines; other lines are skipped."""
    return [move for line in lines if (move := parse_move(line)) is not None]


def parse_move(line: Mapping[str, Any]) -> RequestMove | None:
    """Returns the line's move; None for any other line, because a monitor must not fail on it."""
    try:
        return msgspec.convert({k: v for k, v in line.items() if v is not None}, RequestMove)
    except msgspec.ValidationError:
        return None


HEARTBEATS_KEPT = 20  # ten seconds of heartbeats, behind the mean speed and idle share
STEPS_KEPT = 240  # length of the sparklines
ROLLOUTS_KEPT = 1024
VERSIONS_KEPT = 64
LINES_KEPT = 240  # evaluations, and supervisor events
PROMPTS_KEPT = 4096
MOVES_KEPT = 1024
TERMS_KEPT = 8192
HOLES_KEPT = 64
FORKED_ROLES = ("trainer", "prompts")  # `rollstream fork` itself holds their first term
TERMLESS = ("eval", "scorer-")  # begins of the names of processes without terms


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Counts the dead letters of one topic and keeps the reason of the newest."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class ArchiveBacklog:
    """Counts the records of one topic that the archive has not committed; `oldest_s` is the append
    time of the oldest, in seconds since the epoch.
    """

    records: int
    oldest_s: float


@dataclass(slots=True)
class RunState:
    """Holds the state of a run and applies records of any topic to it. Applying a record twice
    changes at most a count of repeats.
    """

    groups: GroupTracker = field(default_factory=GroupTracker)
    samples: RecentSamples = field(default_factory=RecentSamples)
    steps: deque[StepDone] = field(default_factory=lambda: deque[StepDone](maxlen=STEPS_KEPT))
    rollouts: dict[str, deque[RolloutStatus]] = field(
        default_factory=dict[str, deque[RolloutStatus]]
    )
    """The last heartbeats of each rollout in its newest term."""
    weights: WeightsAnnounced | None = None
    announced: OrderedDict[Version, str] = field(default_factory=OrderedDict[Version, str])
    """The hash of the manifest of each announced version."""
    applied: dict[str, Applied] = field(default_factory=dict[str, Applied])
    """The newest `Applied` record of each rollout."""
    prompts: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])
    """The publication time of each group that is published and not admitted yet."""
    epochs: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])
    """The pass over the prompts, from 0, of each of the newest published groups."""
    evaluations: deque[dict[str, Any]] = field(
        default_factory=lambda: deque[dict[str, Any]](maxlen=LINES_KEPT)
    )
    events: deque[dict[str, Any]] = field(
        default_factory=lambda: deque[dict[str, Any]](maxlen=LINES_KEPT)
    )
    """Starts, deaths and endings that the supervisor recorded."""
    moves: deque[RequestMove] = field(default_factory=lambda: deque[RequestMove](maxlen=MOVES_KEPT))
    """Repack moves, the newest last."""
    foreign: Counter[str] = field(default_factory=Counter[str])
    """Readable records that dispatch refused as foreign, by topic."""
    terms: dict[str, int] = field(default_factory=dict[str, int])
    """The newest term of each role and rollout, from the second term on."""
    relays: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """The newest term of each relay and how often it restarted. The relays of a run share one
    sequence of terms, so a term alone does not tell the restarts.
    """
    deaths: Counter[str] = field(default_factory=Counter[str])
    """The number of deaths by role, as far as a supervisor recorded them."""
    is_fork: bool = False
    began_s: float | None = None
    """The append time of the first kept record."""
    newest_s: dict[str, float] = field(default_factory=dict[str, float])
    """The append time of each topic's newest record."""
    dead_letters: dict[str, DeadLetters] = field(default_factory=dict[str, DeadLetters])
    unarchived: Mapping[str, ArchiveBacklog] = field(default_factory=dict[str, ArchiveBacklog])
    unreadable: int = 0
    holes: list[str] = field(default_factory=list[str])
    """The first parts of the log that cannot be read although they were not truncated."""
    is_tail: bool = False
    """True if the counts do not cover the start of the run."""

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
            case Opened():
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
        """Apply a line of `eval.jsonl`, which replaces an earlier line of its step; a line without
        a step is ignored.
        """
        if isinstance(line.get("step"), int):
            lines = [*(one for one in self.evaluations if one["step"] != line["step"]), line]
            self.evaluations.clear()
            self.evaluations.extend(sorted(lines, key=lambda one: one["step"]))

    def apply_event(self, line: dict[str, Any]) -> None:
        """Apply a line of `supervisor.jsonl`."""
        if isinstance(line.get("time_s"), int | float):
            self.events.append(line)
            self.deaths[str(line.get("role"))] += line.get("event") == "death"

    def apply_move(self, line: dict[str, Any]) -> None:
        """Apply a line of `moves.jsonl`: a move, or counts of foreign records; others are
        ignored.
        """
        counts = line.get("foreign")
        if isinstance(counts, dict):
            for topic, number in cast(dict[str, object], counts).items():
                if topic in FOREIGN_TOPICS and isinstance(number, int):
                    self.foreign[topic] += number
        move = parse_move(line)
        if move is not None:
            self.moves.append(move)

    def apply_hole(self, hole: "Hole") -> None:
        """Apply a part of the log that cannot be read. A part that was truncated without an archive
        is no fault: the counts then do not cover the start of the run.
        """
        if hole.reason == "truncated":
            self.is_tail = True
        elif hole.reason != "archived twice" and len(self.holes) < HOLES_KEPT:
            self.holes.append(str(hole))

    def apply_term(self, role: str, term: int) -> None:
        """Apply the term of a single-holder role or of a rollout; 1 is the first."""
        if term > self.terms.get(role, 1):
            self.terms[role] = term
            if len(self.terms) > TERMS_KEPT:
                del self.terms[next(iter(self.terms))]

    def restarts(self) -> dict[str, int]:
        """Returns the number of restarts of each role that restarted: its terms after the first,
        under any supervisor or orchestrator. For roles without terms it is the number of their
        recorded deaths.
        """
        forked = FORKED_ROLES if self.is_fork else ()
        found = {r: restarts_of(term) - (r in forked) for r, term in self.terms.items()}
        found |= {relay: restarts for relay, (_, restarts) in self.relays.items()}
        found |= {role: n for role, n in self.deaths.items() if role.startswith(TERMLESS)}
        return {role: restarts for role, restarts in sorted(found.items()) if restarts}

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

    def _relay(self, status: RelayStatus) -> None:
        term, restarts = self.relays.get(status.relay, (status.term, 0))
        if status.term >= term:
            self.relays[status.relay] = status.term, restarts + (status.term > term)
            if len(self.relays) > TERMS_KEPT:
                del self.relays[next(iter(self.relays))]

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
