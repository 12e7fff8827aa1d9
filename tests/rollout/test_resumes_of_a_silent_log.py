"""A rollout whose log does not answer generates what it has: a resume waits for its partials, and
nothing else waits for that (`ChainPrefetch`).
"""

import threading

import numpy as np
import pytest

from rollstream.errors import BusError, BusTimeout
from rollstream.producers.rollout.chain import ChainPrefetch
from rollstream.producers.rollout.worker import RolloutLoop
from rollstream.streams.records import Partial, Trajectory
from testbed.memory import MemoryBus
from testbed.waiting import wait_for
from tests.rollout.test_giving_up import Scene, Turns, order, release, untouched, whole


class SilentBus(MemoryBus):
    """A bus on which reads of partials wait for `answers`, and then fail with `failure` once."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.failure: BusError | None = None
        self.reads = 0

    def read(self, topic, positions, **how):  # type: ignore[no-untyped-def]
        if topic == "partials":
            self.reads += 1
            assert self.answers.wait(60)
            failure, self.failure = self.failure, None
            if failure is not None:
                raise failure
        return super().read(topic, positions, **how)


def given_up(bus: SilentBus) -> Scene:
    """A trajectory whose first tokens are in the log, to be resumed on b."""
    scene = Scene(bus)
    source = scene.rollout("a")
    scene.order(order("a"))
    scene.turn(source, 6)
    scene.order(release("a"))
    scene.turn(source, 1)
    bus.answers.set()
    last = scene.records("partials", Partial)[-1]
    bus.answers.clear()
    scene.order(order("b", kind="resume", attempt=2, partial=last.address, moves=1))
    return scene


def prefetching(scene: Scene) -> tuple[RolloutLoop, Turns]:
    rollout, turns = scene.rollout("b")
    rollout.in_progress.prefetch = ChainPrefetch(scene.bus)
    return rollout, turns


def test_other_answers_are_generated_while_a_resume_waits_for_its_partials():
    bus = SilentBus()
    scene = given_up(bus)
    destination = prefetching(scene)
    scene.order(order("b", trajectory="4.0", group=4, index=0, tokens=np.array([5], np.uint32)))
    scene.turn(destination, 60)
    finished = [one.record.trajectory for one in scene.records("trajectories", Trajectory)]
    assert finished == ["4.0"]
    assert [one.trajectory for one in destination[0].assignments.waiting] == ["3.1"]
    bus.answers.set()
    wait_for(lambda: scene.turn(destination, 5) and scene.records("trajectories", Trajectory)[1:])
    resumed = [r for r in scene.records("trajectories", Trajectory) if r.record.group == 3]
    assert resumed[0].record.tokens.tolist() == untouched()


def test_partials_are_read_again_after_a_time_out():
    bus = SilentBus()
    scene = given_up(bus)
    destination = prefetching(scene)
    bus.failure = BusTimeout("no answer within 60 s")
    bus.answers.set()
    wait_for(lambda: scene.turn(destination, 5) and scene.records("trajectories", Trajectory))
    assert bus.failure is None
    assert whole(scene) == untouched()


def test_an_error_of_the_log_ends_the_rollout():
    """It is no time-out: a broker that refuses would refuse again."""
    bus = SilentBus()
    scene = given_up(bus)
    destination = prefetching(scene)
    bus.failure = BusError("the broker refuses it")
    bus.answers.set()
    with pytest.raises(BusError, match="refuses"):
        wait_for(lambda: scene.turn(destination, 5) and scene.records("trajectories", Trajectory))
