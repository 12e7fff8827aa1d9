"""Dispatch: one holder of the lease reads what happened, plans with pure functions and appends
orders.

Its whole state is a fold over topics (`state.py`), so a new holder starts by reading them: first
what earlier holders wrote, up to its own `Opened` (invariant 7), then what trainer and rollouts
wrote. It orders whatever nobody living generates (`recover.py`), so a dispatch killed between an
admission and its orders leaves nothing behind.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from consumers.dispatch.admit import Pace, admissible
from consumers.dispatch.inbox import REFUSABLE, Inbox
from consumers.dispatch.kept import restored
from consumers.dispatch.memory import Memory
from consumers.dispatch.moves import Handed, Repacking
from consumers.dispatch.ordering import Ordered, Ordering
from consumers.dispatch.orders import admission, free_rooms, release
from consumers.dispatch.plausible import Terms
from consumers.dispatch.recover import orphans
from consumers.dispatch.state import DispatchState, Order, Released
from consumers.dispatch.stranded import History
from consumers.dispatch.waves import Waves
from consumers.settings import DispatchSettings
from storage.manifest import read_manifest
from storage.objects import ObjectStore
from streams.bus import Bus
from streams.errors import CorruptObject, ObjectMissing
from streams.figures import Figures
from streams.reader import TopicReader
from streams.records import Address, Admitted, Assignment, Version
from streams.topics import partition_of
from streams.writer import FencedWriter

log = logging.getLogger(__name__)

ROUND_S = 0.05  # between two rounds; queued orders keep slots busy meanwhile


@dataclass(slots=True)
class Dispatch:
    """Everything one term of dispatch works with."""

    bus: Bus
    store: ObjectStore
    settings: DispatchSettings
    pace: Pace
    keep_version: bool
    term: int
    truncate: bool = True
    monotonic: Callable[[], float] = time.monotonic
    on_move: Callable[[Handed, float], None] = lambda handed, plan_s: None
    """Told of each move that was asked for, and how many seconds planning took: for who looks."""
    state: DispatchState = field(default_factory=DispatchState)
    inbox: Inbox | None = None
    counts: Counter[str] = field(default_factory=Counter[str])
    """Orders of this term by kind, `again` those that throw work away, `recalled` those for which a
    version is loaded from history, `moved` what was asked back for a move, `lost` silent rollouts.
    """
    ordering: Ordering = field(init=False)
    repacking: Repacking | None = field(init=False)

    def __post_init__(self) -> None:
        """Repack frees rollouts that must be empty to take new weights: none else gains by it."""
        pace, settings = self.pace, self.settings
        waves = Waves(self.keep_version, pace.groups_per_step)
        history = None
        if self.keep_version:
            history = History(self._bytes_of, settings.load_bytes_per_s, pace.max_lag)
        self.ordering = Ordering(pace, self.keep_version, settings.queue_per_slot, waves, history)
        self.repacking = None
        if settings.repack and self.keep_version:
            every_s, groups = settings.repack_every_s, pace.groups_per_step
            self.repacking = Repacking(every_s, pace.max_lag, groups)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop`."""
        memory = Memory(
            self.bus, self.store, self.term, self.truncate, self.settings.keep_s, self.monotonic
        )
        kept = memory.recall()  # before `Opened`: see kept.py
        admissions = FencedWriter(self.bus, "admissions", "dispatch", self.term)
        assignments = FencedWriter(self.bus, "assignments", "dispatch", self.term)
        own = {"admissions": admissions.open(), "assignments": assignments.open()}
        state = restored(kept)
        wave = self.pace.groups_per_step
        timeout_s = self.settings.heartbeat_timeout_s
        taken = Terms(self.store, self.monotonic).has_taken
        lengths = memory.recall_lengths()
        inbox = Inbox(self.bus, state, self.monotonic, lengths, wave, timeout_s, taken)
        state.stuck_timeout_s = self.settings.stuck_timeout_s
        inbox.rebuild(own, kept.where() if kept else {})
        self.state, self.inbox = state, inbox
        log.info(
            "dispatch term %d: %d admitted, %d open", self.term, state.admitted, len(state.groups)
        )
        while not stop.is_set():
            left = state.left()  # what they published before they left is read below
            news, released = inbox.read()
            self._give(state, assignments, releases=_releases(released))
            gone = forget_silent(state, inbox, self.settings.heartbeat_timeout_s, left)
            self._tell_lost(gone)
            if news or gone:  # plans follow from the state alone: no news, no other plan
                self._admit(state, inbox, admissions)
                self._give(state, assignments, self._orders(state, inbox))
            self._repack(state, inbox, assignments)
            if news:
                memory.keep(state, inbox, admissions, assignments)
                memory.keep_lengths(inbox.lengths)
            stop.wait(ROUND_S)

    def _admit(self, state: DispatchState, inbox: Inbox, writer: FencedWriter) -> None:
        """Admit as many groups as the pace allows and as rollouts have room for."""
        allowed = admissible(
            self.pace, state.version.number, state.admitted, state.closed, state.trained
        )
        room = sum(free_rooms(state, self.settings.queue_per_slot).new.values())
        room -= sum(map(len, orphans(state)))
        records: list[Admitted] = []
        while allowed > len(records) and room > 0 and (next_prompt := inbox.next_prompt()):
            prompt, at = next_prompt
            room -= prompt.samples
            record = admission(state, self.pace, prompt, at, self.settings.group_deadline_s)
            state.apply_admitted(record)
            state.groups[prompt.group].prompt = prompt
            records.append(record)
        if records:
            writer.append([(str(record.group), record) for record in records])

    def _orders(self, state: DispatchState, inbox: Inbox) -> list[Ordered]:
        """For every open trajectory that nobody generates, as far as there is room."""
        return self.ordering.plan(state, inbox.lengths, inbox.ahead(), self.monotonic())

    def _bytes_of(self, version: Version) -> int | None:
        """What it is to load this version whole; None when it is gone."""
        try:
            return read_manifest(self.store, version).full_bytes
        except (ObjectMissing, CorruptObject) as error:
            log.warning("what was generated under %s starts again: %s", version, error)
            return None

    def _repack(self, state: DispatchState, inbox: Inbox, writer: FencedWriter) -> None:
        """When it is time: ask back what is to move; what is too old starts again on the newest
        version, and whoever has it is told.
        """
        if self.repacking is None:
            return
        began_s = self.monotonic()
        plan = self.repacking.plan(state, inbox.lengths, began_s)
        if plan is None:
            return
        plan_s = self.monotonic() - began_s
        late = {trajectory: state.orders[trajectory] for trajectory in plan.deferred}
        again = self.ordering.put_off(state, plan.deferred, inbox.lengths)
        void = [_void(state, o.record.trajectory, late[o.record.trajectory]) for o in again]
        self._give(state, writer, again, [*plan.releases, *void])
        self.counts["moved"] += len(plan.releases)
        for one in plan.handed():
            log.info("%s hands %d requests to %s", one.source, one.requests, one.destination)
            self.on_move(one, plan_s)

    def _give(
        self,
        state: DispatchState,
        writer: FencedWriter,
        orders: Sequence[Ordered] = (),
        releases: Sequence[Assignment] = (),
    ) -> None:
        """Append these in one go; they are in force then."""
        for order in orders:
            record = order.record
            if record.from_history:
                self.counts["recalled"] += 1
                log.info(
                    "%s goes on: %s loads %s", record.trajectory, record.rollout, record.version
                )
            if order.again:
                self.counts["again"] += 1
                log.warning("%s starts again (attempt %d)", record.trajectory, record.attempt)
        records = [*(order.record for order in orders), *releases]
        for record, at in zip(records, self._append(writer, records), strict=True):
            state.apply_assignment(record, at)

    def _append(self, writer: FencedWriter, records: list[Assignment]) -> list[Address]:
        """Each rollout reads one partition, chosen by its name; others' orders there are not its
        own.
        """
        if not records:
            return []
        self.counts.update(record.kind for record in records)
        partitions = self.bus.partitions("assignments")
        return writer.append(
            [
                (record.trajectory, record, partition_of(record.rollout.encode(), partitions))
                for record in records
            ]
        )

    def _tell_lost(self, rollouts: Sequence[str]) -> None:
        self.counts["lost"] += len(rollouts)
        for rollout in rollouts:
            log.warning("rollout %s is silent or stuck: its trajectories go on elsewhere", rollout)

    def figures(self) -> Figures:
        """Counts of groups are of the whole run, those of orders of this term."""
        state, kinds = self.state, ("start", "resume", "release")
        admitted, closed, trained = state.admitted, state.closed, state.trained
        groups = list(state.groups.values())
        refused = Counter[str]() if self.inbox is None else self.inbox.refused
        return {
            "dispatch_groups_admitted_total": admitted,
            "dispatch_groups_trained_total": trained,
            "dispatch_groups_closed_total": closed,
            "dispatch_groups_open": len(groups),
            "dispatch_groups_admissible": admissible(
                self.pace, state.version.number, admitted, closed, trained
            ),
            "dispatch_trajectories_open": sum(len(group.open) for group in groups),
            "dispatch_trajectories_completed_total": state.completed,
            "dispatch_trajectories_late_total": state.late,
            "dispatch_trajectories_again_total": self.counts["again"],
            "dispatch_trajectories_recalled_total": self.counts["recalled"],
            "dispatch_orders_in_force": len(state.orders),
            "dispatch_orders_total": {kind: self.counts[kind] for kind in kinds},
            "dispatch_moves_total": self.counts["moved"],
            "dispatch_rollouts": len(state.rollouts),
            "dispatch_rollouts_lost_total": self.counts["lost"],
            "dispatch_records_refused_total": {topic: refused[topic] for topic in REFUSABLE},
            "dispatch_prompts_waiting": 0 if self.inbox is None else self.inbox.prompts_waiting,
            "dispatch_version_newest": state.version.number,
        }

    def readers(self) -> list[TopicReader]:
        return [] if self.inbox is None else self.inbox.readers()


def forget_silent(
    state: DispatchState, inbox: Inbox, timeout_s: float, left: Collection[str] = ()
) -> list[str]:
    """Forget rollouts without a heartbeat, stuck ones and those that have `left`; returns the
    former two.

    What a stall of dispatch would do otherwise: a thousand living rollouts have 24 000 statuses in
    the log after 12 s, one read returns 512, and the other rollouts look silent.
    """
    before_s = inbox.listened_s - timeout_s
    if left or state.silent(before_s):
        inbox.read_to_end()
    return state.forget_rollouts(before_s, left)


def _releases(released: Sequence[Released]) -> list[Assignment]:
    """Nobody waits for these: their groups ended."""
    return [
        release(one.group.prompt, one.trajectory, one.order)
        for one in released
        if one.group.prompt is not None
    ]


def _void(state: DispatchState, trajectory: str, order: Order) -> Assignment:
    prompt = state.group_of(trajectory).prompt
    assert prompt is not None, "an order is planned only once its prompt was read"
    return release(prompt, trajectory, order)
