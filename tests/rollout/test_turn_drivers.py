"""What every `TurnDriver` does, over a real engine and a log: answers, dialogues, episodes, and one
of a few lines that a newcomer could write.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollstream.metric_values import MetricValues
from rollstream.producers.agents.episode import PendingTurn
from rollstream.producers.agents.episodes import AgentEpisodes
from rollstream.producers.agents.inbox import AgentInbox, EndTicket, TurnTicket
from rollstream.producers.agents.keys import SessionKeys
from rollstream.producers.agents.programs import ServicePrograms
from rollstream.producers.agents.requests import read_request
from rollstream.producers.engine_factory import open_engine
from rollstream.producers.engines.base import Emission
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.environments.dialogue import Dialogue
from rollstream.producers.rollout.chain import ChainContent
from rollstream.producers.rollout.heartbeat import StatusSchedule
from rollstream.producers.rollout.in_progress import InProgress
from rollstream.producers.rollout.judging import Judging
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.single_turn import SingleTurn
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.rollout.turn_driver import RolloutParts, TurnDriver
from rollstream.producers.settings import RolloutSettings
from rollstream.producers.tasks.base import Reply, Turns
from rollstream.streams.bus import Bus
from rollstream.streams.records import Assignment, Trajectory
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from testbed.agents.rollout import SERVICE, assignment, letter_model, letters_format, resumed
from testbed.memory import MemoryBus
from testbed.stepped.fake_engine import FakeRewards
from testbed.synchronous_sender import SynchronousSender

TURNS = 3  # of a dialogue and of an episode
LAST_POLL = 400
SETTINGS = RolloutSettings(slots=4, context_max=256)


weights = cache(letter_model)


class Echo:
    """The smallest driver: an answer is its prompt, said at once and without the engine."""

    has_prompt, poll_s, parked_max = True, 1.0, 0

    def __init__(self, parts: RolloutParts) -> None:
        self.parts = parts
        self.running: dict[str, RunningTrajectory] = {}
        self.parked: dict[str, RunningTrajectory] = {}

    def chain_problem(self, content: ChainContent) -> str:
        return ""

    def start(self, running: RunningTrajectory) -> None:
        self.running[running.assignment.trajectory] = running

    def grow(self, emission: Emission) -> None:
        raise AssertionError("the engine has nothing of this driver")

    def accept(self) -> None: ...

    def wait(self, seconds: float) -> bool:
        return False

    def poll(self) -> list[Trajectory]:
        for name in list(self.running):
            running = self.running.pop(name)
            said, version = running.assignment.tokens, self.parts.engine.version
            if not running.generated:
                logprobs = np.zeros(len(said), np.float32)
                running.extend(Emission(name, said, logprobs, version, "stop"))
            self.parts.judging.judge(running, "stop")
        return self.parts.judging.poll()

    def drop(self, trajectory: str) -> None:
        self.running.pop(trajectory, None)
        self.parts.judging.drop(trajectory)

    def leave(self, trajectory: str) -> None:
        self.parts.publisher.give_up([self.running.pop(trajectory)])

    def leave_all(self) -> None:
        for trajectory in list(self.running):
            self.leave(trajectory)

    def growing(self) -> Sequence[RunningTrajectory]:
        return list(self.running.values())

    @property
    def awaited(self) -> int:
        return len(self.parts.judging)

    def open_max(self, room: int) -> int:
        return room

    def metric_values(self) -> MetricValues:
        return {}

    def close(self) -> None: ...


class Replies(FakeRewards):
    """A pool whose environment says two letters after each turn but the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Reply] = {}

    def submit_turn(self, key: str, reference: str, state: str, turns: Turns) -> None:
        number = int(state or 0) + 1
        said = () if number >= TURNS else (97 + number, 10)
        self.asked[key] = Reply(said, str(number))

    def cancel(self, key: str) -> None:
        del self.asked[key]

    def poll(self) -> list[tuple[str, Any]]:
        replies = list(self.asked.items())
        self.asked.clear()
        return [*super().poll(), *replies]


@dataclass
class Stage:
    """One rollout of a driver, without its loop; programs of episodes speak in `speak`."""

    bus: Bus
    kind: Callable[[RolloutParts], TurnDriver]
    name: str = "a"
    spoken: dict[str, PendingTurn] = field(default_factory=dict[str, PendingTurn])
    driver: TurnDriver = field(init=False)
    in_progress: InProgress = field(init=False)

    def __post_init__(self) -> None:
        model = weights()
        engine = open_engine(
            "torch", model.config, model.state_dict(), Version(0, 1), EngineOptions(4, 256)
        )
        voice = RolloutPublisher(
            self.bus, SynchronousSender(self.bus), self.name, 1, SETTINGS, StatusSchedule(1.0)
        )
        judging = Judging(Replies(), 1, lambda: engine.version)  # pyright: ignore[reportArgumentType]
        self.driver = self.kind(RolloutParts(engine, judging, voice, SETTINGS))
        self.in_progress = InProgress(self.driver)

    def begin(self, order: Assignment) -> None:
        self.in_progress.start(order)

    def step(self) -> list[Trajectory]:
        """One turn of the rollout's loop; returns what ended."""
        self.speak()
        self.driver.accept()
        for emission in self.driver.parts.engine.poll(0.0):
            self.driver.grow(emission)
        self.in_progress.collect_outcomes()
        ended = list(self.in_progress.done)
        self.in_progress.publish()
        return ended

    def to_end(self) -> Trajectory:
        """Returns the record of the one trajectory that ends."""
        for _ in range(LAST_POLL):
            if ended := self.step():
                (record,) = ended
                return record
        raise AssertionError("it has not ended")

    def speak(self) -> None:
        """Ask for the next turn of each open episode, or end it: a program without a process. A
        program that begins again asks for what it has heard before, too.
        """
        if not isinstance(self.driver, AgentEpisodes):
            return
        for name, episode in list(self.driver.open.items()):
            running, before = episode.running, self.spoken.get(name)
            if before is not None and not before.outcome.done():
                continue
            sampling, number = running.assignment.sampling, len(running.turns)
            asked = [
                read_request("completion", {"prompt": f"turn {n}", "max_tokens": 12}, sampling)
                for n in range(number + 1)
            ]
            episode.reached.update(one.digest for one in asked)
            if number == TURNS:
                self.driver.inbox.put(EndTicket(episode, 1.0))
                continue
            request = asked[-1]
            plan = episode.conversation.plan(request.messages, request.tools, request.prompt)
            self.spoken[name] = PendingTurn(request, plan, 0.0)
            self.driver.inbox.put(TurnTicket(episode, self.spoken[name]))

    @property
    def is_idle(self) -> bool:
        stats = self.driver.parts.engine.stats()
        return not (stats.running or stats.waiting)


def episodes(parts: RolloutParts) -> TurnDriver:
    keys = SessionKeys(b"0" * 32)
    return AgentEpisodes(parts, SERVICE, letters_format(), keys, ServicePrograms(), AgentInbox())


KINDS = {"answers": SingleTurn, "dialogue": Dialogue, "episodes": episodes, "echo": Echo}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Callable[[RolloutParts], TurnDriver]:
    return KINDS[request.param]


@pytest.fixture
def bus() -> Bus:
    bus = MemoryBus()
    bus.create(catalogue(1))
    return bus


def order(name: str = "0.0") -> Assignment:
    return assignment(name, tokens_max=60)


def test_a_trajectory_ends_in_one_record_and_leaves_nothing_behind(kind, bus: Bus):
    """Invariant 2: one completion."""
    stage = Stage(bus, kind)
    stage.begin(order())
    record = stage.to_end()
    assert (record.trajectory, record.attempt) == ("0.0", 1)
    assert record.finish in ("stop", "length")
    assert record.reward is not None
    assert len(record.logprobs) > 0
    assert not any(stage.step() for _ in range(20)), "it ends once"
    assert (len(stage.in_progress), stage.driver.awaited) == (0, 0)
    assert stage.is_idle


def test_a_dropped_trajectory_has_no_record_and_another_attempt_can_begin(kind, bus: Bus):
    stage = Stage(bus, kind)
    for steps in (0, 1, 5, 9):
        stage.begin(order())
        if any(stage.step() for _ in range(steps)):
            continue  # it has ended before
        stage.in_progress.driver.drop("0.0")
        stage.spoken.clear()
        assert (len(stage.in_progress), stage.driver.awaited) == (0, 0)
        assert not any(stage.step() for _ in range(20))
        assert stage.is_idle
    stage.spoken.clear()
    stage.begin(replace(order(), attempt=7))
    assert stage.to_end().attempt == 7


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("way", ["release", "all"])
def test_one_that_is_handed_over_ends_with_the_same_tokens(kind, bus: Bus, steps: int, way: str):
    """Wherever it leaves, between turns too: the other rollout ends it as this one would have."""
    untouched = tokens_alone(kind)
    source, destination = Stage(bus, kind), Stage(bus, kind, "b")
    source.begin(order())
    ended = [record for _ in range(steps) for record in source.step()]
    if way == "release":
        source.in_progress.give_up(order())
    else:
        source.in_progress.give_up_all(())
    for _ in range(20):  # what follows an ended turn is awaited: a reward ends it here
        ended += source.step()
    assert source.is_idle
    assert (len(source.in_progress), source.driver.awaited) == (0, 0)
    if not ended:
        destination.begin(resumed(bus, order()))
        ended.append(destination.to_end())
        assert ended[0].attempt == 2
    assert [record.tokens.tolist() for record in ended] == [untouched]


@cache
def tokens_alone(kind: Callable[[RolloutParts], TurnDriver]) -> list[int]:
    """The tokens of a trajectory that nothing disturbs."""
    bus = MemoryBus()
    bus.create(catalogue(1))
    alone = Stage(bus, kind)
    alone.begin(order())
    return alone.to_end().tokens.tolist()


def test_the_suite_meets_what_it_is_about():
    """Dialogues and episodes have several turns, and engine and environment both say something."""
    answer, dialogue, episode = (tokens_alone(one) for one in (SingleTurn, Dialogue, episodes))
    assert len(answer) < len(dialogue)
    assert dialogue.count(10) == TURNS - 1, "the environment's replies"
    assert len(episode) > len(answer)


def test_what_a_rollout_plans_with_is_within_bounds(kind, bus: Bus):
    driver = Stage(bus, kind).driver
    assert driver.open_max(room=5) >= 5
    assert driver.parked_max >= 0
    assert isinstance(driver.wait(0.0), bool)
    driver.close()
    assert len(driver.running) + len(driver.parked) + driver.awaited == 0
