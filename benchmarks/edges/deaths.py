"""Odd inputs from the side of agents (`edges_deaths`): requests, tool definitions, states of
episodes in partials, and texts of a model, seeded (`testbed/hostile/agents.py`).

A part of them meets a living run of real processes: requests over HTTP through the role `endpoint`
and the rollout, and partials in its topic in the names of its open episodes, while a rollout is
killed twice (quick: once), so that another one resumes them (`testbed/hostile/agents_run.py`). The
others meet, in this process, the functions that endpoint and loop call: `read_json`, `read_request`
and `Conversation.plan` for a request, `read_chains`, `unusable_chain` and `Episode` for a partial,
`answered_turn` for a text.

`edges_deaths` counts roles that ended (other than by these kills), errors that passed a boundary,
and inputs that were not accounted for once: a request without one answer of 2xx or 4xx, an episode
without one completion, and what audit and recount find.
"""

import dataclasses
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.case import Case, alone
from rollstream.errors import DecodeError, RollstreamError
from rollstream.producers.agents.chat_format import ChatFormat, JsonObject
from rollstream.producers.agents.conversation import Conversation
from rollstream.producers.agents.episode import (
    Episode,
    OpenTurn,
    PendingTurn,
    held_tokens,
    unusable_chain,
)
from rollstream.producers.agents.keys import SessionIdentity
from rollstream.producers.agents.requests import Route, read_request
from rollstream.producers.agents.turns import answered_turn
from rollstream.producers.dialogue.tool_formats import TOOL_FORMATS
from rollstream.producers.engines.base import Emission
from rollstream.producers.rollout.chain import ChainRequest, read_chains
from rollstream.producers.rollout.trajectory import RunningTrajectory
from rollstream.producers.tasks.tool_calls import ParsedAnswer, parse_tool_calls
from rollstream.streams.bus import Bus
from rollstream.streams.codec import encoding_problem
from rollstream.streams.foreign_text import ForeignValueRefused, read_json
from rollstream.streams.records import Partial
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address, Version
from rollstream.streams.writer import publish_all
from testbed.agents.rollout import assignment, letters_format
from testbed.hostile import agents as odd
from testbed.hostile.agents_run import LivingRun
from testbed.memory import MemoryBus

SEED = 39
KILLS, KILLS_QUICK = 2, 1
ROUTE_NAMES: dict[str, Route] = dict(
    zip(odd.ROUTES, ("chat", "completion", "response", "tokens"), strict=True)
)


@dataclass(frozen=True, slots=True)
class Shares:
    """How many inputs of each kind there are; `http` and `appended` meet the living run."""

    http: int
    appended: int
    requests: int
    tools: int
    states: int
    texts: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


FULL = Shares(
    http=6_000, appended=4_000, requests=85_000, tools=35_000, states=30_000, texts=40_000
)
QUICK = Shares(http=200, appended=150, requests=1_500, tools=700, states=500, texts=800)


@dataclass
class Outcome:
    """What became of the inputs: `passed` errors went through a boundary, `unaccounted` inputs had
    no end or several.
    """

    passed: list[str] = field(default_factory=list[str])
    unaccounted: list[str] = field(default_factory=list[str])
    ends: Counter[str] = field(default_factory=Counter[str])
    roles: int = 0

    @property
    def deaths(self) -> int:
        return len(self.passed) + len(self.unaccounted) + self.roles


def cases(quick: bool) -> Iterator[Case]:
    """Goal: 0."""
    shares, outcome = QUICK if quick else FULL, Outcome()
    assert quick or shares.total == 200_000
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    try:
        _requests(shares, outcome)
        _texts(shares, outcome)
        _states(shares, outcome)
        alone_s = time.monotonic() - began
        with tempfile.TemporaryDirectory(prefix="rollstream-deaths-") as scratch:
            kills = KILLS_QUICK if quick else KILLS
            living = LivingRun(Path(scratch), shares.http, shares.appended, kills).run()
        outcome.roles += living.roles
        outcome.ends += living.ends
        outcome.unaccounted += living.unaccounted
    finally:
        logging.disable(level)
    ends = ", ".join(f"{count} {what}" for what, count in sorted(outcome.ends.items()))
    first = [*outcome.passed, *outcome.unaccounted][:3]
    note = (
        f"{shares.total} inputs, {shares.http + shares.appended} of them in a living run; "
        f"{outcome.roles} roles ended, {len(outcome.passed)} errors passed a boundary, "
        f"{len(outcome.unaccounted)} not accounted for once; {ends}; "
        f"{alone_s:.0f} s in this process, {time.monotonic() - began - alone_s:.0f} s with the run"
    )
    text = "; ".join([note, *first])
    yield alone("edges_deaths", outcome.deaths, "deaths", at_most=0, note=text)


# ---- in this process -----------------------------------------------------------------------------


def _requests(shares: Shares, outcome: Outcome) -> None:
    """What the endpoint does with a body before the loop has the turn."""
    chat, run = letters_format(), assignment().sampling
    running = RunningTrajectory.start(assignment(), None, 0.0, is_episode=True)
    conversation = Conversation(chat, held_tokens(running))

    def plan(route: str, data: bytes) -> str:
        try:
            body: Any = read_json(data) if data else {}
        except ForeignValueRefused:
            return "bodies refused"
        if not isinstance(body, dict):
            return "bodies refused"
        try:
            request = read_request(ROUTE_NAMES[route], cast("JsonObject", body), run)
            conversation.plan(request.messages, request.tools, request.prompt)
        except RollstreamError as error:
            str(error).encode()
            return "requests refused"
        return "requests planned"

    for number in range(shares.requests):
        route, data = odd.hostile_body(SEED, number)
        _bounded(outcome, f"request {number}", lambda route=route, data=data: plan(route, data))
    for number in range(shares.tools):
        data = odd.hostile_tools(SEED, number)
        _bounded(outcome, f"tools {number}", lambda data=data: plan(odd.ROUTES[0], data))


def _texts(shares: Shares, outcome: Outcome) -> None:
    """What the loop does with the text of a model; the turn must fit into a record."""
    running = RunningTrajectory.start(assignment(), None, 0.0, is_episode=True)
    tool = {"type": "function", "function": {"name": "add"}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    request = read_request("chat", body, assignment().sampling)
    formats, base = tuple(TOOL_FORMATS), letters_format()
    for number in range(shares.texts):
        text = odd.hostile_text(SEED, number)
        chat: Any = _Spoken(base, text, formats[number % len(formats)])
        conversation = Conversation(chat, held_tokens(running))
        episode = Episode(SessionIdentity("0.0", 1, "r", 1), "", running, conversation, 0.0)
        planned = conversation.plan_tokens([1, 2], is_text=False)
        turn = OpenTurn(PendingTurn(request, planned, 0.0), "0.0", "", 0.0)
        turn.emissions, turn.count, turn.finish = [_emission()], 2, "stop"

        def answer(episode: Episode = episode, turn: OpenTurn = turn) -> str:
            answered = answered_turn(episode, turn)
            partial = odd.partial("0.0", "", turns=(answered,))
            if problem := encoding_problem(partial):
                raise AssertionError(problem)
            return "texts with calls" if answered.finish == "tool_calls" else "texts as content"

        _bounded(outcome, f"text {number}", answer)


class _Spoken:
    """The chat of a model that writes a given text."""

    def __init__(self, base: ChatFormat, text: str, tool_format: str) -> None:
        self._chat, self._text, self._format = base, text, tool_format

    def decode(self, tokens: Sequence[int]) -> str:
        return self._text

    def parse(
        self, tokens: Sequence[int], tools: Sequence[JsonObject], call_prefix: str
    ) -> ParsedAnswer:
        return parse_tool_calls(self._text, self._format, tools, lambda at: f"{call_prefix}{at}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chat, name)


def _states(shares: Shares, outcome: Outcome) -> None:
    """What a resuming rollout does with the chain that ends with a partial."""
    bus = MemoryBus()
    bus.create(catalogue(1))
    for first in range(0, shares.states, 1000):
        numbers = range(first, min(first + 1000, shares.states))
        partials = [odd.hostile_partial(SEED, f"{number}.0", number) for number in numbers]
        at = publish_all(bus, "partials", [(one.trajectory, one) for one in partials])
        for number, partial, address in zip(numbers, partials, at, strict=True):
            _bounded(
                outcome,
                f"state {number}",
                lambda partial=partial, address=address: _resumed(bus, partial, address),
            )
        bus.truncate("partials", bus.end("partials"))


def _resumed(bus: Bus, partial: Partial, at: Address) -> str:
    name = partial.trajectory
    found = read_chains(bus, [ChainRequest(name, at, at, 0, 1000)])[name]
    if isinstance(found, DecodeError) or unusable_chain(found):
        return "chains that start again"
    running = RunningTrajectory.start(assignment(name), found, 0.0, is_episode=True)
    conversation = Conversation(letters_format(), held_tokens(running))
    episode = Episode(SessionIdentity(name, 1, "r", 1), "", running, conversation, 0.0)
    running.abandoned = episode.abandoned()
    record = running.to_record(1, "dead", 0.0, Version(0, 1), reason="agent: test")
    if problem := encoding_problem(record):
        raise AssertionError(problem)
    return "chains resumed"


def _bounded(outcome: Outcome, what: str, call: Any) -> None:
    try:
        outcome.ends[call()] += 1
    except Exception as error:  # noqa: BLE001 (what passes is what is counted)
        outcome.passed.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")


def _emission() -> Emission:
    tokens, logprobs = np.array([97, 98], np.uint32), np.zeros(2, np.float32)
    return Emission("0.0", tokens, logprobs, Version(0, 1), "stop")
