"""A rollout gives a trajectory up when dispatch asks for it: all its generated tokens are in its
last partial, and the rollout that resumes it continues identically (invariants 2, 3, 10).
"""

from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from rollstream.producers.rollout.assignments import AssignmentQueue
from rollstream.producers.rollout.heartbeat import StatusSchedule
from rollstream.producers.rollout.in_progress import InProgress
from rollstream.producers.rollout.judging import Judging
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.single_turn import SingleTurn
from rollstream.producers.rollout.turn_driver import RolloutParts
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.producers.rollout.worker import RolloutLoop
from rollstream.producers.settings import RolloutSettings
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Assignment, Partial, Record, Trajectory
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Sampling, Version
from rollstream.streams.writer import FencedWriter
from testbed.memory import MemoryBus, MemoryStore
from testbed.stepped.fake_engine import FakeEngine, FakeRewards
from testbed.synchronous_sender import SynchronousSender
from tests.rollout.chains import read_chain

V0 = Version(0, 1)
SETTINGS = RolloutSettings(slots=4, context_max=64, partial_tokens=4, on_update="keep_version")


@dataclass
class Turns:
    """Clock and stop of a rollout that makes a number of rounds."""

    now_s: float = 1.0
    left: int = 0

    def is_set(self) -> bool:
        self.now_s += 0.1
        self.left -= 1
        return self.left < 0

    def wait(self, timeout: float) -> bool:
        return False


@dataclass
class Scene:
    """One bus, its dispatch, and rollouts that take turns."""

    bus: Bus = field(default_factory=MemoryBus)

    def __post_init__(self) -> None:
        self.bus.create(catalogue(1))
        self._writer = FencedWriter(self.bus, "assignments", "dispatch", 1)
        self._writer.open()

    def order(self, *records: Assignment) -> None:
        self._writer.append([(record.trajectory, record, 0) for record in records])

    def rollout(self, name: str, version: Version = V0) -> tuple[RolloutLoop, Turns]:
        turns = Turns()

        def clock() -> float:
            return turns.now_s

        engine = FakeEngine(version, SETTINGS.slots, clock, is_slow=True)
        judging = Judging(FakeRewards(), 1, lambda: engine.version, clock)  # type: ignore[arg-type]
        voice = RolloutPublisher(
            self.bus, SynchronousSender(self.bus), name, 1, SETTINGS, StatusSchedule(0.5), clock
        )
        follower = WeightsFollower(self.bus, MemoryStore())
        orders = AssignmentQueue(self.bus, name, 1)
        driver = SingleTurn(RolloutParts(engine, judging, voice, SETTINGS, clock))
        return RolloutLoop(follower, orders, InProgress(driver)), turns

    def turn(self, of: tuple[RolloutLoop, Turns], rounds: int) -> RolloutLoop:
        """Runs rounds without leaving at the end."""
        rollout, turns = of
        turns.left = rounds
        while not turns.is_set():
            rollout.take_assignments()
            rollout.start_waiting()
            rollout.generate()
            rollout.in_progress.collect_outcomes()
            rollout.publish()
        return rollout

    def records(self, topic: str, kind: type[Record]) -> list:
        reader = TopicReader(self.bus, topic, from_begin(self.bus, topic))
        return [r for r in reader.read_to(self.bus.end(topic)) if isinstance(r.record, kind)]


def order(rollout: str, **changed: object) -> Assignment:
    start = Assignment(
        "start", "3.1", 3, 1, 1, rollout, 1, V0, "remainder", np.array([5, 6], np.uint32),
        Sampling(tokens_max=40), 0,
    )  # fmt: skip
    return replace(start, **changed)


def release(rollout: str, attempt: int = 1) -> Assignment:
    return order(rollout, kind="release", attempt=attempt, onward="b")


def whole(scene: Scene) -> list[int]:
    (finished,) = scene.records("trajectories", Trajectory)
    return finished.record.tokens.tolist()


def untouched() -> list[int]:
    scene = Scene()
    scene.order(order("a"))
    scene.turn(scene.rollout("a"), 60)
    return whole(scene)


def test_a_resume_on_any_rollout_gives_the_same_tokens():
    scene = Scene()
    source, destination = scene.rollout("a"), scene.rollout("b")
    scene.order(order("a"))
    scene.turn(source, 6)
    scene.order(release("a"))
    assert scene.turn(source, 1).driver.running == {}
    last = scene.records("partials", Partial)[-1]
    assert last.record.last
    assert len(read_chain(scene.bus, last.address, "3.1").tokens) == 6
    scene.order(order("b", kind="resume", attempt=2, partial=last.address, moves=1))
    scene.turn(destination, 60)
    assert whole(scene) == untouched()


def test_what_ended_before_it_was_asked_for_is_not_given_up():
    """Invariant 2: its completion is published; no partial could be resumed past its end."""
    scene = Scene()
    source = scene.rollout("a")
    scene.order(order("a"))
    scene.turn(source, 60)
    scene.order(release("a"))
    scene.turn(source, 2)
    assert len(scene.records("trajectories", Trajectory)) == 1
    assert not any(r.record.last for r in scene.records("partials", Partial))


def test_an_assignment_that_was_not_begun_is_released_with_its_chain():
    scene = Scene()
    source = scene.rollout("a")
    scene.order(order("a"), release("a"))
    assert scene.turn(source, 1).driver.running == {}
    (last,) = scene.records("partials", Partial)
    assert last.record.last
    assert len(last.record.tokens) == 0


def test_a_release_of_an_earlier_attempt_changes_nothing():
    scene = Scene()
    source = scene.rollout("a")
    scene.order(order("a", attempt=2))
    scene.turn(source, 3)
    scene.order(release("a", attempt=1))
    assert set(scene.turn(source, 1).driver.running) == {"3.1"}


def test_a_resume_whose_version_is_gone_goes_back_with_all_it_has():
    """Invariant 4: never resumed under another version, and nothing dropped."""
    scene = Scene()
    source, destination = scene.rollout("a"), scene.rollout("b", Version(1, 1))
    scene.order(order("a"))
    scene.turn(source, 6)
    scene.order(release("a"))
    scene.turn(source, 1)
    given_up = scene.records("partials", Partial)[-1]
    scene.order(order("b", kind="resume", attempt=2, partial=given_up.address))
    assert scene.turn(destination, 1).driver.running == {}
    back = scene.records("partials", Partial)[-1]
    assert (back.record.attempt, back.record.last) == (2, True)
    assert len(read_chain(scene.bus, back.address, "3.1").tokens) == 6


def test_a_stopping_rollout_releases_everything_in_progress():
    scene = Scene()
    rollout, turns = scene.rollout("a")
    scene.order(order("a"))
    turns.left = 3
    rollout.run(turns)  # type: ignore[arg-type]
    last = scene.records("partials", Partial)[-1]
    assert last.record.last
    assert len(read_chain(scene.bus, last.address, "3.1").tokens) == 3


def test_resumes_come_first_then_the_oldest_wave_its_probes_and_the_longest():
    scene = Scene()
    rollout, _ = scene.rollout("a")
    ask = {
        "late": order("a", trajectory="9.1", wave=2, predicted=900),
        "short": order("a", trajectory="1.1", wave=1, predicted=10),
        "long": order("a", trajectory="2.1", wave=1, predicted=30),
        "unknown": order("a", trajectory="4.1", wave=1),
        "probe": order("a", trajectory="4.0", index=0, wave=1),
        "resume": order("a", trajectory="8.1", kind="resume", wave=3),
    }
    scene.order(*ask.values())
    rollout.assignments.read()
    turn = [o.trajectory for o in rollout.assignments.waiting]
    named = {o.trajectory: name for name, o in ask.items()}
    wanted = ["resume", "probe", "unknown", "long", "short", "late"]
    assert [named[t] for t in turn] == wanted
