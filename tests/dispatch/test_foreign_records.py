"""No record appended to a topic of many writers ends dispatch, or makes it assign work to a rollout
that does not exist (invariants 8 and 12).
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from rollstream.consumers.dispatch.inbox import DispatchInbox
from rollstream.consumers.dispatch.layouts import WaveLayouts
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.moves import RepackPlanner
from rollstream.consumers.dispatch.persistence import DispatchPersistence
from rollstream.consumers.dispatch.planner import AssignmentPlanner, Moved, Resumed, Started
from rollstream.consumers.dispatch.service import Dispatch
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.consumers.settings import DispatchSettings
from rollstream.storage.terms import LOOKUP_S, RoleTerms, next_term
from rollstream.streams.records import (
    Admitted,
    Applied,
    Partial,
    Prompt,
    Record,
    RelayStatus,
    RolloutStatus,
    Trajectory,
)
from rollstream.streams.topics import catalogue, partition_of
from rollstream.streams.values import Address, Drafts, Sampling, Span, Version
from rollstream.streams.writer import FencedWriter, publish
from testbed.memory import MemoryBus, MemoryStore
from tests.dispatch.test_recovery import PACE, V3, partial, status

NAMES = ("a", "b")
GROUPS = 3
TOPICS = {
    Partial: "partials", RolloutStatus: "status", RelayStatus: "status",
    Trajectory: "trajectories", Applied: "applied",
}  # fmt: skip

numbers = st.sampled_from(
    [0, 1, 2, 8, -1, 1 << 31, 1 << 53, 1 << 63, 1 << 70, -(1 << 70), 10**400]
) | st.integers(-3, 20)
names = st.sampled_from([*NAMES, *NAMES, *NAMES, "", "x/y", "..", "a" * 2000, "nobody"])
terms = st.sampled_from([1, 1, 1, 0, -1, 2, 1000, 1 << 70])
texts = st.sampled_from(["a", "b", "0.0", "1.1", "", "x/y", "..", "\x00", "a" * 2000, "\U0001f4a5"])
speeds = st.sampled_from([0.0, 1.0, -1.0, 5e-324, 1e300])
versions = st.builds(Version, numbers, numbers)
spans = st.lists(st.builds(Span, numbers, numbers, versions), max_size=3).map(tuple)
partials = st.builds(
    Partial, st.sampled_from(["0.0", "0.1", "1.0", "9.9", "x"]), numbers, terms, names, terms,
    st.none() | st.builds(Address, numbers, numbers), numbers,
    st.just(np.zeros(2, np.uint32)), st.just(np.ones(2, np.uint8)),
    st.just(np.zeros(2, np.float32)), spans, last=st.booleans(),
    drafts=st.none() | st.builds(Drafts, st.tuples(numbers), *[numbers] * 4, speeds),
)  # fmt: skip
statuses = st.builds(
    RolloutStatus, names, terms, numbers, numbers, numbers, numbers, numbers, versions,
    st.booleans(), st.sampled_from(["generating", "draining", "leaving", "pulling"]), numbers,
    speeds, numbers, speeds, speeds, numbers, numbers, speeds, st.booleans(), numbers,
)  # fmt: skip
applied = st.builds(Applied, names, terms, versions, texts, texts, numbers, speeds, speeds)
finished = st.builds(
    Trajectory, st.sampled_from(["0.0", "9.9", "x"]), st.sampled_from([-1, 7, 1 << 70]), numbers,
    numbers, texts, texts, numbers, st.just(np.zeros(2, np.uint32)), st.just(np.ones(2, np.uint8)),
    st.just(np.zeros(2, np.float32)), spans, st.just("stop"), st.none(), versions, speeds, speeds,
)  # fmt: skip


@dataclass
class Scene:
    """Dispatch's inbox and plans over memory; two rollouts live, each in its term 1."""

    keep_version: bool = True
    bus: MemoryBus = field(default_factory=MemoryBus)
    store: MemoryStore = field(default_factory=MemoryStore)
    now_s: float = 100.0
    appended: int = 0

    def __post_init__(self) -> None:
        self.bus.create(catalogue(2))
        self.state, self.lengths = DispatchState(version=Version(4, 1)), LengthHistory()
        self.admissions = FencedWriter(self.bus, "admissions", "dispatch", 1)
        self.assignments = FencedWriter(self.bus, "assignments", "dispatch", 1)
        own = {"admissions": self.admissions.open(), "assignments": self.assignments.open()}
        self.memory = DispatchPersistence(self.bus, self.store, 1, True, 0.0, lambda: self.now_s)
        self.memory.state_file.take_over()
        terms = RoleTerms(self.store, lambda: self.now_s)
        self.inbox = DispatchInbox(
            self.bus, self.state, lambda: self.now_s, self.lengths, terms=terms
        )
        self.inbox.rebuild(own, {})
        started = Started(WaveLayouts(self.keep_version, 2))
        steps = (Moved(), Resumed(), started)
        self.ordering = AssignmentPlanner(PACE, self.keep_version, 1.0, steps)
        self.repacking = RepackPlanner(0.0, 2, 2)
        for name in NAMES:
            next_term(self.store, "rollouts", name)
            self.append(status(name, slots=4, running=1, kv_used=5, kv_previous=50))
        for group in range(GROUPS):
            names = (f"{group}.0", f"{group}.1")
            self.state.apply_admitted(Admitted(group, 0, names, 60.0, Address(0, 0)))
            prompt = Prompt(group, "t", np.ones(2, np.uint32), 2, Sampling(tokens_max=9), seed=0)
            self.state.groups[group].prompt = prompt

    def append(self, record: Record) -> None:
        """Under a key of its own: compaction of `status` removes none before it was read."""
        self.appended += 1
        publish(self.bus, TOPICS[type(record)], f"k{self.appended}", record)

    def round(self) -> None:
        """The service's loop: read, plan, assign, repack, persist."""
        self.now_s += LOOKUP_S
        self.inbox.read()
        orders = [o.record for o in self.ordering.plan(self.state, self.lengths, [], self.now_s)]
        plan = self.repacking.plan(self.state, self.lengths, self.now_s)
        records = [*orders, *(() if plan is None else plan.releases)]
        written = [(record.trajectory, record, 0) for record in records]
        for record, at in zip(records, self.assignments.append(written), strict=True):
            self.state.apply_assignment(record, at)
        self.memory.keep(self.state, self.inbox, self.admissions, self.assignments)


@settings(max_examples=60, deadline=None)
@given(records=st.lists(partials | statuses | applied | finished, max_size=8), keep=st.booleans())
def test_dispatch_survives_whatever_decodes(records: list[Record], keep: bool):
    scene = Scene(keep)
    scene.round()
    for record in records:
        scene.append(record)
    scene.round()
    scene.append(partial("0.0", 1))
    scene.round()
    assert set(scene.state.rollouts) <= set(NAMES)
    assert {o.rollout for o in scene.state.assignments.values()} <= set(NAMES)
    assert all(o.rollout_term == 1 for o in scene.state.assignments.values())
    assert set(scene.state.chains) <= {"0.0"}


def test_a_status_in_a_term_that_was_never_taken_makes_no_zombie_of_the_living():
    """Otherwise the next assignment names that term, and the living process exits as replaced."""
    scene = Scene()
    scene.append(status("a", term=1000))
    scene.append(status("nobody", slots=1000))
    scene.round()
    assert {n: seen.status.term for n, seen in scene.state.rollouts.items()} == {"a": 1, "b": 1}
    assert scene.inbox.refused["status"] == 2
    assert scene.inbox.foreign == {"status": 2}


def test_a_restarted_rollout_is_known_at_once():
    scene = Scene()
    scene.round()
    next_term(scene.store, "rollouts", "a")
    scene.append(status("a", term=2))
    scene.round()
    assert scene.state.rollouts["a"].status.term == 2


def test_a_rollout_that_starts_within_a_moment_of_another_one_is_no_foreign_program():
    """The store is asked for unknown names once a second, and both start within that second."""
    scene = Scene()
    scene.round()
    for name in ("c", "d"):
        next_term(scene.store, "rollouts", name)
        scene.append(status(name))
        scene.now_s += LOOKUP_S / 10
        scene.inbox.read()
    scene.append(status("nobody"))
    scene.now_s += LOOKUP_S / 10
    scene.inbox.read()
    assert not scene.inbox.foreign
    scene.append(status("d"))
    scene.round()
    assert scene.inbox.foreign == {"status": 1}
    assert "d" in scene.state.rollouts


def test_a_flood_of_names_costs_one_listing():
    scene = Scene()
    scene.round()
    looks: list[str] = []
    listed = scene.store.list
    scene.store.list = lambda prefix="": looks.append(prefix) or listed(prefix)  # type: ignore
    for number in range(300):
        scene.append(status(f"hostile-{number}"))
    scene.round()
    assert looks == ["roles/rollouts/"]
    assert scene.inbox.refused["status"] == 300


def test_a_partial_of_an_unassigned_attempt_moves_no_chain():
    scene = Scene()
    scene.round()
    holder = scene.state.assignments["0.0"].rollout
    mine = replace(partial("0.0", 1), rollout=holder)
    scene.append(mine)
    for lie in (replace(mine, attempt=2), replace(mine, rollout="x"), replace(mine, attempt=0)):
        scene.append(replace(lie, last=True))
    scene.round()
    assert scene.state.chains["0.0"].attempt == 1
    assert not scene.state.assignments["0.0"].given_up
    assert scene.inbox.refused["partials"] == 3
    assert not scene.inbox.foreign, "late partials of a living rollout look the same"
    assert scene.state.chains["0.0"].version == V3


def test_a_completion_outside_its_groups_partition_ends_no_trajectory():
    """The trainer skips it, so the trajectory still has to be generated."""
    scene = Scene()
    other = 1 - partition_of(b"0", 2)
    at = "a", 1, np.ones(2, np.uint32), np.array([0, 1], np.uint8), np.zeros(1, np.float32)
    spans, version = (Span(0, 1, Version(4, 1)),), Version(4, 1)
    record = Trajectory("0.0", 0, 0, 1, "t", *at, spans, "stop", 0.0, version, 0.0, 1.0)
    publish(scene.bus, "trajectories", "0", record, other)
    scene.round()
    assert (scene.state.completed, scene.state.late) == (0, 1)
    publish(scene.bus, "trajectories", "0", record)
    scene.round()
    assert (scene.state.completed, scene.state.late) == (1, 1)


def test_dispatch_tells_observers_how_many_records_are_foreign():
    scene, stop = Scene(), threading.Event()
    for number in range(3):
        scene.append(status(f"hostile-{number}"))
    told: list[Mapping[str, int]] = []

    def observe(counts: Mapping[str, int]) -> None:
        told.append(counts)
        stop.set()

    dispatch = Dispatch(
        scene.bus, scene.store, DispatchSettings(), PACE, False, 2, on_foreign=observe
    )
    alarm = threading.Timer(30.0, stop.set)
    alarm.start()
    dispatch.run(stop)
    alarm.cancel()
    assert told == [{"status": 3}]
