"""Runs dispatch: the role with a single holder that admits groups and assigns every open trajectory
to a living rollout.

Its state is a fold over topics: a new holder loads the persisted state and reads the later records,
first of the topics that dispatch itself writes, up to its own `Opened` (invariant 7). Each plan
covers all open trajectories that no living rollout generates, so after a death between an admission
and its assignments the next holder appends them.

Reading list: after `producers/prompt_source.py`, before `consumers/dispatch/state.py`.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rollstream.consumers.dispatch.admission import AdmissionPace, admissible_now
from rollstream.consumers.dispatch.assignments import admission_record, release_record
from rollstream.consumers.dispatch.inbox import DispatchInbox
from rollstream.consumers.dispatch.metrics import dispatch_metrics
from rollstream.consumers.dispatch.persistence import DispatchPersistence, restore_state
from rollstream.consumers.dispatch.policy import (
    AssignmentPolicy,
    MoveSummary,
    PlannedAssignment,
    PolicyScope,
    open_policy,
)
from rollstream.consumers.dispatch.state import DispatchState, VoidAssignment
from rollstream.consumers.settings import DispatchSettings
from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.metric_values import MetricValues
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.terms import RoleTerms
from rollstream.storage.weights.manifest import read_manifest
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader
from rollstream.streams.records import Admitted, Assignment
from rollstream.streams.topics import partition_of
from rollstream.streams.values import Address, Version
from rollstream.streams.writer import FencedWriter

log = logging.getLogger(__name__)

FOREIGN_S = 5.0  # least time between two calls of `on_foreign`, each of which logs a line
ROUND_S = 0.05  # pause between two rounds of the loop; rollouts have queued assignments meanwhile


@dataclass(slots=True)
class Dispatch:
    """Runs one term. `keep_version` is True if that is the value of `rollouts.on_update`. With
    `truncate` records that no rebuild needs are removed from the log.
    """

    bus: Bus
    store: ObjectStore
    settings: DispatchSettings
    pace: AdmissionPace
    keep_version: bool
    term: int
    truncate: bool = True
    monotonic: Callable[[], float] = time.monotonic
    on_move: Callable[[MoveSummary, float], None] = lambda move, plan_s: None
    """Called for each pair of rollouts between which trajectories are to move, with their number
    and the seconds of planning.
    """
    on_foreign: Callable[[Mapping[str, int]], None] = lambda counts: None
    """Called with the number of foreign records by topic since the last call, at most every
    `FOREIGN_S`.
    """
    has_adapters: bool = False
    state: DispatchState = field(default_factory=DispatchState)
    inbox: DispatchInbox | None = None
    counts: Counter[str] = field(default_factory=Counter[str])
    """Counts of this term: assignments by kind (`start`, `resume`, `release`); `again`: restarts
    that discard tokens; `recalled`: resumes for which a rollout loads an old version; `moved`:
    trajectories to be released for a move; `lost`: silent or stuck rollouts.
    """
    policy: AssignmentPolicy = field(init=False)
    _newest_values: MetricValues = field(init=False)
    """The metrics at the end of the newest round: within a round, related counts may differ."""

    def __post_init__(self) -> None:
        self.policy = open_policy(
            PolicyScope(
                self.settings, self.pace, self.keep_version, self.has_adapters, self._bytes_of
            )
        )
        self._note_metrics()

    def run(self, stop: threading.Event) -> None:
        """Raises `Fenced` when a higher term takes over."""
        persistence = DispatchPersistence(
            self.bus, self.store, self.term, self.truncate, self.settings.keep_s, self.monotonic
        )
        # Swaps this term into the persisted state before `Opened` is appended, so that an earlier
        # holder cannot persist its own state any more.
        saved = persistence.state_file.take_over()
        admissions = FencedWriter(self.bus, "admissions", "dispatch", self.term)
        assignments = FencedWriter(self.bus, "assignments", "dispatch", self.term)
        opened = {"admissions": admissions.open(), "assignments": assignments.open()}
        state = restore_state(saved)
        wave = self.pace.groups_per_step
        timeout_s = self.settings.heartbeat_timeout_s
        terms = RoleTerms(self.store, self.monotonic)
        lengths = persistence.load_lengths()
        inbox = DispatchInbox(self.bus, state, self.monotonic, lengths, wave, timeout_s, terms)
        state.stuck_timeout_s = self.settings.stuck_timeout_s
        inbox.rebuild(opened, saved.where() if saved else {})
        self.state, self.inbox = state, inbox
        log.info(
            "dispatch term %d: %d admitted, %d open", self.term, state.admitted, len(state.groups)
        )
        reported, reported_s = Counter[str](), -FOREIGN_S
        self._note_metrics()
        while not stop.is_set():
            # Before `read`, which reads the last records of these rollouts.
            departed = state.departed()
            news, released = inbox.read()
            self._append_and_apply(state, assignments, releases=_release_records(released))
            inbox.remove_silent_keys()
            dropped = drop_silent_rollouts(
                state, inbox, self.settings.heartbeat_timeout_s, departed
            )
            self.counts["lost"] += len(dropped)
            for rollout in dropped:
                log.warning(
                    "rollout %s is silent or stuck: its trajectories are reassigned", rollout
                )
            if news or dropped:  # a plan is a function of the state: without news it is the same
                self._admit(state, inbox, admissions)
                plan = self.policy.plan(state, inbox.lengths, inbox.ahead(), self.monotonic())
                self._append_and_apply(state, assignments, plan)
            self._move(state, inbox, assignments)
            if inbox.foreign != reported and self.monotonic() - reported_s >= FOREIGN_S:
                self.on_foreign(inbox.foreign - reported)
                reported, reported_s = inbox.foreign.copy(), self.monotonic()
            if news:
                persistence.keep(state, inbox, admissions, assignments)
                persistence.save_lengths(inbox.lengths)
            self._note_metrics()
            stop.wait(ROUND_S)

    def _admit(self, state: DispatchState, inbox: DispatchInbox, writer: FencedWriter) -> None:
        allowed, room = admissible_now(self.pace, state), self.policy.room(state)
        records: list[Admitted] = []
        while allowed > len(records) and room > 0 and (next_prompt := inbox.next_prompt()):
            prompt, at = next_prompt
            room -= prompt.samples
            record = admission_record(state, self.pace, prompt, at, self.settings.group_deadline_s)
            state.apply_admitted(record)
            state.groups[prompt.group].prompt = prompt
            records.append(record)
        if records:
            writer.append([(str(record.group), record) for record in records])

    def _bytes_of(self, version: Version) -> int | None:
        """The bytes of this version in full; None if it was deleted or its manifest is damaged."""
        try:
            return read_manifest(self.store, version).full_bytes
        except (ObjectMissing, CorruptObject) as error:
            log.warning("trajectories under version %s restart from the prompt: %s", version, error)
            return None

    def _move(self, state: DispatchState, inbox: DispatchInbox, writer: FencedWriter) -> None:
        began_s = self.monotonic()
        plan = self.policy.move(state, inbox.lengths, began_s)
        if plan is None:
            return
        plan_s = self.monotonic() - began_s
        void = [
            VoidAssignment(state.group_of(t), t, state.assignments[t])
            for t in (restart.record.trajectory for restart in plan.restarts)
        ]
        # By a release its rollout gives a trajectory up: to move, or because a restart replaces its
        # attempt.
        releases = [*plan.releases, *_release_records(void)]
        self._append_and_apply(state, writer, plan.restarts, releases)
        self.counts["moved"] += len(plan.releases)
        for move in plan.summaries:
            log.info(
                "moving %d requests from %s to %s", move.requests, move.source, move.destination
            )
            self.on_move(move, plan_s)

    def _append_and_apply(
        self,
        state: DispatchState,
        writer: FencedWriter,
        planned: Sequence[PlannedAssignment] = (),
        releases: Sequence[Assignment] = (),
    ) -> None:
        for assignment in planned:
            record = assignment.record
            if record.from_history:
                self.counts["recalled"] += 1
                log.info(
                    "%s resumes: %s loads %s", record.trajectory, record.rollout, record.version
                )
            if assignment.discards_tokens:
                self.counts["again"] += 1
                log.warning("%s restarts (attempt %d)", record.trajectory, record.attempt)
        records = [*(assignment.record for assignment in planned), *releases]
        for record, at in zip(records, self._append(writer, records), strict=True):
            state.apply_assignment(record, at)

    def _append(self, writer: FencedWriter, records: list[Assignment]) -> list[Address]:
        if not records:
            return []
        self.counts.update(record.kind for record in records)
        # A rollout reads the one partition that follows from its name, and skips the records of
        # others there.
        partitions = self.bus.partitions("assignments")
        return writer.append(
            [
                (record.trajectory, record, partition_of(record.rollout.encode(), partitions))
                for record in records
            ]
        )

    def metric_values(self) -> MetricValues:
        """Returns the metric values as of the end of the newest round. Counts of groups and of
        completions are of the whole run, all others of this term.
        """
        return self._newest_values

    def _note_metrics(self) -> None:
        self._newest_values = dispatch_metrics(self.state, self.inbox, self.pace, self.counts)

    def readers(self) -> list[TopicReader]:
        return [] if self.inbox is None else self.inbox.readers()


def drop_silent_rollouts(
    state: DispatchState, inbox: DispatchInbox, timeout_s: float, departed: Collection[str] = ()
) -> list[str]:
    """Drops rollouts that are silent (without a heartbeat for `timeout_s`), stuck (their loop makes
    no progress) or in `departed`. Returns the silent and stuck ones.
    """
    before_s = inbox.listening_s - timeout_s
    if departed or state.silent(before_s):
        # Otherwise a stall of dispatch would drop living rollouts: a thousand of them leave 24 000
        # statuses in 12 s, one read returns 512, and the other rollouts look silent.
        inbox.read_to_end()
    return state.drop_rollouts(before_s, departed)


def _release_records(released: Sequence[VoidAssignment]) -> list[Assignment]:
    return [
        release_record(void.group.prompt, void.trajectory, void.assignment)
        for void in released
        if void.group.prompt is not None
    ]
