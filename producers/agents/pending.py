"""Holds a request of a program until its turn is answered (`PendingTurn`), lets the requests of an
episode pass one at a time (`RequestQueue`), and names why a request is refused.
"""

import asyncio
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollstream.errors import RollstreamError
from rollstream.producers.agents.conversation import PlannedPrompt
from rollstream.producers.agents.requests import TurnRequest
from rollstream.streams.values import Turn

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
class PendingTurn:
    """Holds a request for a turn with the tokens that it adds; the outcome is the turn, once it is
    in the log.
    """

    request: TurnRequest
    plan: PlannedPrompt
    asked_s: float
    outcome: "Future[Turn]" = field(default_factory=lambda: Future[Turn]())
