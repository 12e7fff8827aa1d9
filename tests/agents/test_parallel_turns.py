"""Requests of one episode that a program sends at the same time: they are generated together, and
each enters the log once (invariants 10 and 13).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.engine_factory import open_engine
from rollstream.producers.engines.base import Emission
from rollstream.producers.engines.options import EngineOptions
from rollstream.streams.admissible import TrainingBounds, refusal
from rollstream.streams.branches import leaves
from rollstream.streams.bus import Bus
from rollstream.streams.records import Partial, Trajectory
from rollstream.streams.values import Version
from testbed.agents.process import records
from testbed.agents.rollout import (
    CONTEXT,
    AgentRollout,
    agent_rollout,
    assignment,
    letter_model,
    resumed,
)
from testbed.waiting import wait_for
from tests.agents.held_bus import HeldBus


class GatheringEngine:
    """An engine that generates nothing until `wanted` requests are in it, each time it is empty."""

    def __init__(self, wanted: int) -> None:
        model = letter_model()
        options = EngineOptions(slots=8, context_max=CONTEXT, emit_every=4)
        self._engine = open_engine(
            "torch", model.config, model.state_dict(), Version(0, 1), options
        )
        self.wanted, self._running = wanted, set[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Any) -> None:
        self._running.add(request.trajectory)
        self._engine.submit(request)

    def append(self, trajectory: str, tokens: Any, noise: str = "") -> None:
        self._running.add(trajectory)
        self._engine.append(trajectory, tokens, noise)

    def poll(self, deadline_s: float) -> list[Emission]:
        if len(self._running) < self.wanted:
            return []
        found = self._engine.poll(deadline_s)
        for emission in found:
            if emission.finish is not None:
                self._running.discard(emission.trajectory)
                self.wanted = 1  # the others are under way
        return found


def send(rollout: AgentRollout, method: str, path: str, body: object) -> httpx2.Response:
    headers = {"authorization": f"Bearer {rollout.key()}"}
    return httpx2.request(method, rollout.url + path, json=body, headers=headers, timeout=60)


def ask(rollout: AgentRollout, *texts: str, **options: Any) -> httpx2.Response:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    body = {"model": "m", "messages": messages, **options}
    return send(rollout, "POST", "/v1/chat/completions", body)


def text_of(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def asked_together(rollout: AgentRollout, histories: Sequence[Sequence[str]]) -> list[str]:
    """Sends all requests at once; the engine generates nothing before it has them all."""
    rollout.engine.wanted = len(histories)  # type: ignore
    with ThreadPoolExecutor(len(histories)) as threads:
        return list(threads.map(lambda texts: text_of(ask(rollout, *texts)), histories))


def ended(rollout: AgentRollout) -> Trajectory:
    assert send(rollout, "DELETE", "/sessions/0.0", {"reward": 1.0}).status_code == 204
    (record,) = rollout.finished()
    return record


def said(rollout: AgentRollout, record: Trajectory) -> list[str]:
    return [
        rollout.chat.decode(record.tokens[turn.generated : turn.end].tolist()).removesuffix(
            "<|end|>"
        )
        for turn in record.turns
    ]


def gathering(bus: Bus, **options: Any):
    return agent_rollout(bus, engine=GatheringEngine(1), **options)


def test_two_conversations_of_an_episode_are_generated_together_and_are_two_paths(bus: Bus):
    with gathering(bus) as rollout:
        rollout.assign(assignment())
        first = asked_together(rollout, [["left"], ["right, which is longer"]])
        second = asked_together(
            rollout,
            [["left", first[0], "go on"], ["right, which is longer", first[1], "go on"]],
        )
        record = ended(rollout)
    assert sorted(said(rollout, record)) == sorted([*first, *second])
    assert refusal(record, TrainingBounds()) is None
    assert len(leaves(len(record.tokens), record.branches)) == 2
    # The second turn of each conversation continues it: only the second conversation is a fork.
    assert sorted(turn.fork for turn in record.turns) == ["", "", "", "conversation"]


def test_what_a_request_samples_depends_on_no_order(bus: Bus, tmp_path):
    """Invariant 10: generated together, or one after the other in another order."""
    histories = [["left"], ["right"], ["left", "never said", "x"]]
    with gathering(bus) as rollout:
        rollout.assign(assignment())
        together = asked_together(rollout, histories)
        rollout.kill()
    with gathering(bus, term=2) as rollout:
        rollout.assign(assignment("0.0", attempt=2, rollout_term=2))
        in_turn = [text_of(ask(rollout, *texts)) for texts in reversed(histories)]
    assert together == in_turn[::-1]
    assert len(set(together)) == 3


def test_equal_requests_at_the_same_time_share_one_turn(bus: Bus):
    with gathering(bus) as rollout:
        rollout.assign(assignment())
        rollout.engine.wanted = 2  # type: ignore
        with ThreadPoolExecutor(3) as threads:
            pair = [threads.submit(ask, rollout, "hello") for _ in range(2)]
            wait_for(lambda: rollout.failures or rollout.agents.counts.repeated)
            other = threads.submit(ask, rollout, "another")
            texts = {text_of(one.result()) for one in pair}
            text_of(other.result())
        assert len(texts) == 1
        assert len(rollout.agents.open["0.0"].running.turns) == 2


def test_turns_that_end_while_a_partial_is_on_its_way_share_the_next_one(bus: Bus):
    """Invariant 13: the chain stays one line, so a kill leaves each answered turn in it."""
    held, order = HeldBus(bus, "partials"), assignment()
    histories = [["one"], ["two"], ["three"]]
    with gathering(held) as rollout:  # type: ignore
        rollout.assign(order)
        rollout.engine.wanted = 3  # type: ignore
        with ThreadPoolExecutor(3) as threads:
            answers = [threads.submit(ask, rollout, *texts) for texts in histories]
            episode = rollout.agents.open["0.0"]
            wait_for(lambda: rollout.failures or len(episode.ended) == 2)
            assert not any(answer.done() for answer in answers)
            held.go.set()
            texts = [text_of(answer.result()) for answer in answers]
        rollout.kill()
    chain = [one for one in records(bus, "partials") if isinstance(one, Partial)]
    assert [len(partial.turns) for partial in chain] == [1, 2]
    assert chain[1].start == len(chain[0].tokens)
    with agent_rollout(bus, term=2) as rollout:
        rollout.assign(resumed(bus, order, rollout_term=2))
        assert [text_of(ask(rollout, *one)) for one in histories] == texts
        assert rollout.agents.counts.repeated == 3
        record = ended(rollout)
    assert len(record.turns) == 3
    assert not record.abandoned
    assert refusal(record, TrainingBounds()) is None


def test_turns_of_a_killed_rollout_that_were_not_answered_are_sampled_again_equally(bus: Bus):
    held, order = HeldBus(bus, "partials"), assignment()
    histories = [["one"], ["two"], ["three"]]
    with gathering(held) as rollout:  # type: ignore
        rollout.assign(order)
        rollout.engine.wanted = 3  # type: ignore
        threads = ThreadPoolExecutor(3)
        for texts in histories:
            threads.submit(ask, rollout, *texts)
        episode = rollout.agents.open["0.0"]
        wait_for(lambda: rollout.failures or len(episode.ended) == 2)
        lost = [rollout.agents.open["0.0"].ended[n].pending.request.digest for n in range(2)]
        tokens = {
            one.pending.request.digest: [t for e in one.emissions for t in e.tokens.tolist()]
            for one in episode.ended
        }
        rollout.kill()
        held.go.set()
    threads.shutdown()
    wait_for(lambda: records(bus, "partials"))
    with agent_rollout(bus, term=2) as rollout:
        rollout.assign(resumed(bus, order, rollout_term=2))
        for texts in histories:
            text_of(ask(rollout, *texts))
        record = ended(rollout)
    again = {turn.digest: turn for turn in record.turns}
    for digest in lost:
        turn = again[digest]
        assert record.tokens[turn.generated : turn.end].tolist() == tokens[digest]


def test_turns_together_generate_no_more_than_the_episode_may(bus: Bus):
    with gathering(bus) as rollout:
        rollout.assign(assignment(tokens_max=3))
        rollout.engine.wanted = 3  # type: ignore
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(lambda text: ask(rollout, text), ("one", "two", "three")))
        assert {answer.status_code for answer in found} == {200, 400}
        record = ended(rollout)
    assert len(record.logprobs) <= 3
    assert refusal(record, TrainingBounds()) is None


def test_turns_together_count_against_the_most_turns(bus: Bus):
    with gathering(bus, settings=AgentSettings(service=True, turns_max=2)) as rollout:
        rollout.assign(assignment())
        rollout.engine.wanted = 2  # type: ignore
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(lambda text: ask(rollout, text), ("one", "two", "three")))
        assert sorted(answer.status_code for answer in found) == [200, 200, 400]


@pytest.mark.parametrize("body", [{"reward": 0.5}, {}])
def test_an_end_while_turns_are_generated_refuses_them(bus: Bus, body: dict[str, float]):
    with gathering(bus) as rollout, ThreadPoolExecutor(1) as threads:
        rollout.assign(assignment())
        key = rollout.key()
        text_of(ask(rollout, "first"))
        assert send(rollout, "POST", "/sessions/0.0/reward", {"reward": 0.5}).status_code == 204
        rollout.engine.wanted = 2  # type: ignore
        asked = threads.submit(ask, rollout, "second")
        wait_for(lambda: rollout.failures or rollout.agents.open["0.0"].generating)
        headers = {"authorization": f"Bearer {key}"}
        url = f"{rollout.url}/sessions/0.0"
        found = httpx2.request("DELETE", url, json=body, headers=headers, timeout=60)
        assert found.status_code == 204
        assert asked.result().status_code == 409
        (record,) = rollout.finished()
    assert (len(record.turns), record.reward) == (1, 0.5)
    assert not rollout.agents.turns.generating
