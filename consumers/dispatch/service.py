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
from collections.abc import Callable
from dataclasses import dataclass, field

from consumers.dispatch.admit import Pace, admissible
from consumers.dispatch.inbox import Inbox
from consumers.dispatch.kept import restored
from consumers.dispatch.memory import Memory
from consumers.dispatch.orders import (
    Free,
    admission,
    assignment,
    continuations,
    eligible,
    free_rooms,
    release,
)
from consumers.dispatch.place import Room, place
from consumers.dispatch.recover import orphans
from consumers.dispatch.state import DispatchState, Released
from consumers.settings import DispatchSettings
from storage.objects import ObjectStore
from streams.bus import Bus
from streams.figures import Figures
from streams.reader import TopicReader
from streams.records import Address, Admitted, Assignment
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
    state: DispatchState = field(default_factory=DispatchState)
    inbox: Inbox | None = None
    counts: Counter[str] = field(default_factory=Counter[str])
    """Orders of this term by kind, `again` those that throw work away, `lost` silent rollouts."""

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
        inbox = Inbox(self.bus, state, self.monotonic)
        inbox.rebuild(own, kept.where() if kept else {})
        self.state, self.inbox = state, inbox
        log.info(
            "dispatch term %d: %d admitted, %d open", self.term, state.admitted, len(state.groups)
        )
        while not stop.is_set():
            news, released = inbox.read()
            self._release(assignments, released)
            silent = self.monotonic() - self.settings.heartbeat_timeout_s
            gone = state.forget_rollouts(silent)
            self.counts["lost"] += len(gone)
            for rollout in gone:
                log.warning("rollout %s is silent: its trajectories go on elsewhere", rollout)
            if news or gone:  # plans follow from the state alone: no news, no other plan
                self._admit(state, inbox, admissions)
                self._order(state, assignments)
            if news:
                memory.keep(state, inbox, admissions, assignments)
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

    def _order(self, state: DispatchState, writer: FencedWriter) -> None:
        """Order every open trajectory that nobody generates, as far as there is room."""
        free = free_rooms(state, self.settings.queue_per_slot)
        records: list[Assignment] = []
        for lost in orphans(state):
            if not any(free.resumes.values()):
                break
            records += self._order_group(state, lost, free)
        addresses = self._append_orders(writer, records)
        for record, at in zip(records, addresses, strict=True):
            state.apply_assignment(record, at)

    def _append_orders(self, writer: FencedWriter, records: list[Assignment]) -> list[Address]:
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

    def _order_group(self, state: DispatchState, lost: list[str], free: Free) -> list[Assignment]:
        group = state.groups[int(lost[0].rsplit(".", 1)[0])]
        if group.prompt is None:
            return []
        how = continuations(state, lost, self.keep_version)
        records: list[Assignment] = []
        for kind, version in sorted({(c.kind, c.version) for c in how.values()}, key=str):
            alike = [t for t in lost if (how[t].kind, how[t].version) == (kind, version)]
            may = eligible(state, how[alike[0]])
            rooms = free.resumes if kind == "resume" else free.new
            plan = place([alike], [Room(name, room) for name, room in rooms.items() if name in may])
            for trajectory, rollout in plan.items():
                free.take(rollout)
                record = assignment(state, self.pace, group, trajectory, how[trajectory], rollout)
                if how[trajectory].again:
                    self.counts["again"] += 1
                    log.warning("%s starts again (attempt %d)", trajectory, record.attempt)
                state.apply_assignment(record)
                records.append(record)
        return records

    def figures(self) -> Figures:
        """Counts of groups are of the whole run, those of orders of this term."""
        state, kinds = self.state, ("start", "resume", "release")
        admitted, closed, trained = state.admitted, state.closed, state.trained
        groups = list(state.groups.values())
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
            "dispatch_orders_in_force": len(state.orders),
            "dispatch_orders_total": {kind: self.counts[kind] for kind in kinds},
            "dispatch_rollouts": len(state.rollouts),
            "dispatch_rollouts_lost_total": self.counts["lost"],
            "dispatch_prompts_waiting": 0 if self.inbox is None else self.inbox.prompts_waiting,
            "dispatch_version_newest": state.version.number,
        }

    def readers(self) -> list[TopicReader]:
        return [] if self.inbox is None else self.inbox.readers()

    def _release(self, writer: FencedWriter, released: list[Released]) -> None:
        self._append_orders(
            writer,
            [
                release(r.group.prompt, r.trajectory, r.order)
                for r in released
                if r.group.prompt is not None
            ],
        )
