"""The pool of partials is bounded by admission (invariant 8), and the topic is truncated up to the
oldest partial of an open trajectory, no further (invariant 11).
"""

from hypothesis import given, strategies as st
from msgspec.structs import replace

from rollstream.consumers.dispatch.admission import AdmissionPace, admissible_now
from rollstream.consumers.dispatch.inbox import DispatchInbox
from rollstream.consumers.dispatch.persistence import RENEW_S, DispatchPersistence
from rollstream.consumers.dispatch.state import CurrentAssignment, DispatchState
from rollstream.streams.fence import TRUNCATED_GROUP
from rollstream.streams.records import Admitted
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address, Version
from rollstream.streams.writer import FencedWriter, publish
from testbed.memory import MemoryBus, MemoryStore
from tests.dispatch.test_recovery import partial

PACE = AdmissionPace(groups_per_step=2, max_lag=1, ready_groups_max=5, waves_max=1000)
FREE = AdmissionPace(groups_per_step=2, max_lag=None, ready_groups_max=5, waves_max=1000)
SAMPLES = 3
events = st.lists(st.tuples(st.sampled_from("pctx"), st.integers(0, 50)), max_size=200)


def admit_all(state: DispatchState, pace: AdmissionPace, version: int) -> None:
    state.version = Version(version, 0)
    for _ in range(admissible_now(pace, state)):
        group = state.next_group
        names = tuple(f"{group}.{i}" for i in range(SAMPLES))
        state.apply_admitted(Admitted(group, 0, names, 60.0, Address(0, group)))


@given(events=events, pace=st.sampled_from([PACE, FREE]))
def test_only_open_trajectories_have_a_place_in_it(
    events: list[tuple[str, int]], pace: AdmissionPace
):
    """Partials, completions, takes and closings in any order, of groups that are open or not."""
    state = DispatchState()
    most = pace.ready_groups_max if pace.max_lag is None else (pace.max_lag + 1) * 2
    for event, number in events:
        admit_all(state, pace, state.trained // pace.groups_per_step)
        group = number % max(1, state.next_group)
        name = f"{group}.{number % SAMPLES}"
        if event == "p":
            state.apply_partial(replace(partial(name, 1), group=group), Address(0, number))
        elif event == "c":
            state.apply_completion(group, name)
        elif group in state.groups:
            if event == "t":
                state.apply_taken(group, state.trained // pace.groups_per_step + 1)
            else:
                state.apply_closed(group)
        open_ = {t for one in state.groups.values() for t in one.open}
        assert state.chains.keys() <= open_
        assert len(state.chains) <= most * SAMPLES


def test_the_topic_is_truncated_up_to_the_oldest_partial_of_an_open_trajectory():
    bus, store, state = MemoryBus(), MemoryStore(), DispatchState()
    bus.create(catalogue(1))
    admissions = FencedWriter(bus, "admissions", "dispatch", 1)
    assignments = FencedWriter(bus, "assignments", "dispatch", 1)
    own = {"admissions": admissions.open(), "assignments": assignments.open()}
    now = [0.0]
    memory = DispatchPersistence(bus, store, 1, True, 1.0, lambda: now[0])
    memory.state_file.take_over()
    inbox = DispatchInbox(bus, state, lambda: now[0])
    inbox.rebuild(own, {})
    state.apply_admitted(Admitted(0, 0, ("0.0", "0.1", "0.2"), 60.0, Address(0, 0)))
    state.assignments = {f"0.{n}": CurrentAssignment(1, "a", 1, 0, Version(3, 1)) for n in range(3)}
    for name in ("0.0", "0.1", "0.0", "0.2"):
        publish(bus, "partials", name, partial(name, 1))
    for ended, begin in (((), 0), (("0.0",), 1), (("0.1",), 3), (("0.2",), 4)):
        inbox.read()
        for name in ended:
            state.apply_completion(0, name)
        now[0] += 2.0
        memory.keep(state, inbox, admissions, assignments)
        assert bus.begin("partials")[0] == min(begin, 3), "the last record of a partition stays"
    known, commits = bus.committed(TRUNCATED_GROUP, "partials"), list[str]()
    bus.commit = lambda group, topic, positions: commits.append(topic)  # pyright: ignore[reportAttributeAccessIssue]
    now[0] += RENEW_S
    memory.keep(state, inbox, admissions, assignments)
    assert known
    assert "partials" in commits, "brokers forget positions that are not committed again"
