"""Hands the requests of programs from the endpoint's thread to the rollout's loop (`AgentInbox`),
which alone changes episodes. Each command has a future for its outcome; a command that is not taken
before the loop ends fails.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rollstream.errors import RollstreamError
from rollstream.producers.agents.conversation import PlannedPrompt
from rollstream.producers.agents.requests import TurnRequest
from rollstream.streams.values import Turn

if TYPE_CHECKING:
    from rollstream.producers.agents.episodes import Episode

WAITING_MAX = 8192  # commands; an open episode has one at a time
WAITING_PER_EPISODE = 64  # requests that wait for the turn before them

Result = TypeVar("Result")


class SessionSealed(RollstreamError, PermissionError):
    """Raised for a request of an episode that has ended, or whose attempt was replaced."""


class EpisodeMoved(RollstreamError, ConnectionError):
    """Raised for a request that was not answered because the episode continues on another rollout;
    the same request is answered there.
    """


class EndpointBusy(RollstreamError, BlockingIOError):
    """Raised when too many requests wait."""


class LimitReached(RollstreamError, ValueError):
    """Raised for a turn that a limit of the run does not allow."""


class RequestQueue:
    """Lets one request of an episode pass at a time (`async with`), in the order of their arrival.
    Used in the endpoint's event loop alone. Raises `EndpointBusy` if too many wait.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def __aenter__(self) -> None:
        if self._waiting >= WAITING_PER_EPISODE:
            raise EndpointBusy(f"{self._waiting} requests of this episode wait")
        self._waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


def succeed(outcome: "Future[Result]", result: Result) -> None:
    """Set the outcome of a ticket, whose request may have been cancelled."""
    with suppress(InvalidStateError):
        outcome.set_result(result)


def fail(outcome: "Future[Any]", error: Exception) -> None:
    """Set the error of a ticket, whose request may have been cancelled."""
    with suppress(InvalidStateError):
        outcome.set_exception(error)


@dataclass(frozen=True, slots=True)
class TurnTicket:
    """Asks for one turn of an episode; the outcome is the turn, once it is in the log."""

    episode: "Episode"
    request: TurnRequest
    plan: PlannedPrompt
    asked_s: float
    outcome: "Future[Turn]" = field(default_factory=lambda: Future[Turn]())


@dataclass(frozen=True, slots=True)
class RewardTicket:
    """Sets the reward of an episode; the outcome comes once it is in the log."""

    episode: "Episode"
    reward: float
    scores: Mapping[str, float]
    outcome: "Future[None]" = field(default_factory=lambda: Future[None]())


@dataclass(frozen=True, slots=True)
class EndTicket:
    """Ends an episode, with a `reward`, or with the reason of a `failure`."""

    episode: "Episode"
    reward: float | None = None
    failure: str = ""
    outcome: "Future[None]" = field(default_factory=lambda: Future[None]())


@dataclass(frozen=True, slots=True)
class OpenTicket:
    """Asks for an episode that waits for an outside program; None if none waits."""

    outcome: "Future[Episode | None]" = field(default_factory=lambda: Future["Episode | None"]())


Ticket = TurnTicket | RewardTicket | EndTicket | OpenTicket


class AgentInbox:
    """Queues tickets, at most `WAITING_MAX`; both sides may call it at any time."""

    def __init__(self) -> None:
        self._waiting: deque[Ticket] = deque()
        self._arrived = threading.Event()
        self._closed = False

    def put(self, ticket: Ticket) -> None:
        """Queue a ticket. Raises `EndpointBusy` if the queue is full or the loop has ended."""
        if self._closed or len(self._waiting) >= WAITING_MAX:
            raise EndpointBusy("the rollout takes no more requests now")
        self._waiting.append(ticket)
        self._arrived.set()

    def take(self) -> list[Ticket]:
        """Return the tickets that arrived, oldest first."""
        self._arrived.clear()
        taken: list[Ticket] = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        return taken

    def wait(self, timeout_s: float) -> bool:
        """Return when a ticket waits, or after `timeout_s`; whether one waits."""
        return self._arrived.wait(timeout_s)

    def close(self) -> None:
        """Refuse all tickets from now on."""
        self._closed = True
        for ticket in self.take():
            fail(ticket.outcome, EpisodeMoved("the rollout is leaving"))
