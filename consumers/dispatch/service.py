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
from collections.abc import Callable
from dataclasses import dataclass

from consumers.dispatch.admit import Pace, admissible
from consumers.dispatch.inbox import Inbox
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
from streams.bus import Bus
from streams.records import Admitted, Assignment
from streams.topics import partition_of
from streams.writer import FencedWriter

log = logging.getLogger(__name__)

ROUND_S = 0.02  # between two rounds; queued orders keep slots busy meanwhile


@dataclass(slots=True)
class Dispatch:
    """Everything one term of dispatch works with."""

    bus: Bus
    settings: DispatchSettings
    pace: Pace
    keep_version: bool
    term: int
    monotonic: Callable[[], float] = time.monotonic

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop`."""
        admissions = FencedWriter(self.bus, "admissions", "dispatch", self.term)
        assignments = FencedWriter(self.bus, "assignments", "dispatch", self.term)
        own = {"admissions": admissions.open(), "assignments": assignments.open()}
        state = DispatchState()
        inbox = Inbox(self.bus, state, self.monotonic)
        inbox.rebuild(own)
        log.info(
            "dispatch term %d: %d admitted, %d open", self.term, state.admitted, len(state.groups)
        )
        while not stop.is_set():
            news, released = inbox.read()
            self._release(assignments, released)
            silent = self.monotonic() - self.settings.heartbeat_timeout_s
            gone = state.forget_rollouts(silent)
            for rollout in gone:
                log.warning("rollout %s is silent: its trajectories go on elsewhere", rollout)
            if news or gone:  # plans follow from the state alone: no news, no other plan
                self._admit(state, inbox, admissions)
                self._order(state, assignments)
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
        self._append_orders(writer, records)

    def _append_orders(self, writer: FencedWriter, records: list[Assignment]) -> None:
        """Each rollout reads one partition, chosen by its name; others' orders there are not its
        own.
        """
        partitions = self.bus.partitions("assignments")
        if records:
            writer.append(
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
                    log.warning("%s starts again (attempt %d)", trajectory, record.attempt)
                state.apply_assignment(record)
                records.append(record)
        return records

    def _release(self, writer: FencedWriter, released: list[Released]) -> None:
        self._append_orders(
            writer,
            [
                release(r.group.prompt, r.trajectory, r.order)
                for r in released
                if r.group.prompt is not None
            ],
        )
