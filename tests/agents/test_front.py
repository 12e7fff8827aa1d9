"""One address for all rollouts: requests follow an episode to the rollout that continues it."""

import threading
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rollstream.producers.agents import answers
from rollstream.producers.agents.directory import RolloutDirectory
from rollstream.producers.agents.front import EndpointFront
from rollstream.producers.agents.keys import SessionKeys
from rollstream.producers.agents.requests import EpisodeMoved
from rollstream.producers.agents.serving import EndpointThread
from rollstream.streams.bus import Bus
from rollstream.streams.records import Assignment, RolloutStatus
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter, publish
from testbed.agents.rollout import AgentRollout, agent_rollout, assignment, resumed
from testbed.waiting import let_pass, wait_for


@pytest.fixture
def front(bus: Bus) -> Generator[str]:
    served = EndpointFront(RolloutDirectory(bus), SessionKeys(b"0123456789abcdef"), 1 << 20)
    endpoint = EndpointThread(served.app(), "127.0.0.1:0")
    endpoint.start()
    yield f"http://127.0.0.1:{endpoint.port}"
    endpoint.close()


def announce(bus: Bus, rollout: AgentRollout, order: Assignment, url: str = "") -> None:
    """Writes what dispatch and the rollout would have written."""
    status = RolloutStatus(
        rollout=rollout.name, term=rollout.term, slots=8, running=0, waiting=0, kv_used=0,
        kv_capacity=1, version=Version(0, 1), verified=True, health="generating", quota_left=1,
        tokens_per_s=0.0, tokens_total=0, idle_s=0.0, time_s=0.0, url=url or rollout.url,
    )  # fmt: skip
    publish(bus, "status", f"{rollout.name}/{rollout.term}", status)
    dispatch = FencedWriter(bus, "assignments", "dispatch", rollout.term)
    dispatch.open()
    dispatch.append([(order.trajectory, order)])


def ask(front: str, key: str, text: str = "hello") -> httpx2.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.post(f"{front}/v1/chat/completions", json=body, headers=headers, timeout=120)


def test_a_service_opens_and_runs_an_episode_through_the_front(bus: Bus, front: str):
    with agent_rollout(bus) as rollout:
        order = assignment()
        rollout.assign(order)
        announce(bus, rollout, order)
        opened = wait_for(lambda: _opened(front))
        assert opened is not None
        assert opened["base_url"] == f"{front}/v1"
        assert ask(front, opened["key"]).status_code == 200
        headers = {"authorization": f"Bearer {opened['key']}"}
        assert (
            httpx2.delete(f"{front}/sessions/0.0", headers=headers, timeout=60).status_code == 204
        )
        (record,) = rollout.finished()
        assert len(record.turns) == 1
        assert ask(front, "rs-wrong.key").status_code == 401


def _opened(front: str):
    found = httpx2.post(f"{front}/sessions", timeout=60)
    return found.json() if found.status_code == 200 else None


def test_a_request_waits_while_its_rollout_is_replaced(bus: Bus, front: str):
    order = assignment()
    with agent_rollout(bus) as rollout:
        rollout.assign(order)
        announce(bus, rollout, order)
        key = rollout.key()
        first = ask(front, key).json()["choices"][0]["message"]["content"]
        rollout.kill()
    answers: list[httpx2.Response] = []
    asking = threading.Thread(target=lambda: answers.append(ask(front, key)))
    asking.start()
    let_pass(0.2)  # the front meets the dead rollout; the outcome is the same without
    again = resumed(bus, order, rollout_term=2)
    with agent_rollout(bus, term=2) as rollout:
        rollout.assign(again)
        announce(bus, rollout, again)
        asking.join(timeout=120)
        assert answers[0].json()["choices"][0]["message"]["content"] == first


@contextmanager
def leaving(last: bytes, asked: threading.Event) -> Generator[str]:
    """A rollout that keeps a stream alive by a comment, and then leaves it."""

    async def events() -> AsyncIterator[bytes]:
        yield b": generating\n\n"
        if not last:
            raise ConnectionError("the rollout was killed")
        yield last

    async def answer(request: Request) -> Response:
        asked.set()
        return StreamingResponse(events(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])
    endpoint = EndpointThread(app, "127.0.0.1:0")
    endpoint.start()
    yield f"http://127.0.0.1:{endpoint.port}"
    endpoint.close()


@pytest.mark.parametrize("last", [b"", answers.error_event(EpisodeMoved("elsewhere")).encode()])
def test_a_stream_that_has_only_comments_goes_on_elsewhere(bus: Bus, front: str, last: bytes):
    order, asked = assignment(), threading.Event()
    with agent_rollout(bus) as rollout, leaving(last, asked) as url:
        rollout.assign(order)
        announce(bus, rollout, order, url)
        given: list[str] = []

        def read() -> None:
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
            headers = {"authorization": f"Bearer {rollout.key()}"}
            with httpx2.stream("POST", f"{front}/v1/chat/completions", json=body, headers=headers,
                               timeout=120) as found:  # fmt: skip
                given.extend(found.iter_lines())

        reading = threading.Thread(target=read)
        reading.start()
        wait_for(asked.is_set)
        announce(bus, rollout, order)
        reading.join(timeout=120)
    assert given[0] == ": generating"
    assert "data: [DONE]" in given
    assert not any("moving" in line for line in given)
