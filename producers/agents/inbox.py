"""Hands requests of programs from the endpoint's thread to the rollout's loop, and outcomes back. A
ticket that is not taken before the loop ends fails.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from rollstream.producers.agents.episode import Episode, PendingTurn, fail
from rollstream.producers.agents.requests import EndpointBusy, EpisodeMoved
from rollstream.streams.values import Turn

WAITING_MAX = 8192  # tickets


@dataclass(frozen=True, slots=True)
class TurnTicket:
    episode: Episode
    turn: PendingTurn


@dataclass(frozen=True, slots=True)
class RewardTicket:
    episode: Episode
    reward: float
    scores: Mapping[str, float]
    outcome: "Future[None]" = field(default_factory=lambda: Future[None]())


@dataclass(frozen=True, slots=True)
class EndTicket:
    """Ends an episode, with a `reward` and its `scores`, or with the reason of a `failure`."""

    episode: Episode
    reward: float | None = None
    failure: str = ""
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    outcome: "Future[None]" = field(default_factory=lambda: Future[None]())


@dataclass(frozen=True, slots=True)
class OpenTicket:
    """Asks for an episode that waits for an outside program; None if none waits."""

    outcome: "Future[Episode | None]" = field(default_factory=lambda: Future[Episode | None]())


Ticket = TurnTicket | RewardTicket | EndTicket | OpenTicket


class AgentInbox:
    """Queues tickets, at most `WAITING_MAX`; both sides may call it at any time."""

    def __init__(self) -> None:
        self._waiting: deque[Ticket] = deque()
        self._arrived = threading.Event()
        self._closed = False

    def put(self, ticket: Ticket) -> None:
        """Queues a ticket. Raises `EndpointBusy` if the queue is full or the loop has ended."""
        if self._closed or len(self._waiting) >= WAITING_MAX:
            raise EndpointBusy("the rollout takes no more requests now")
        self._waiting.append(ticket)
        self._arrived.set()

    def defer(self, ticket: Ticket) -> None:
        """Queues a taken ticket again, for the loop's next look."""
        self._waiting.append(ticket)

    def take(self) -> list[Ticket]:
        self._arrived.clear()
        taken: list[Ticket] = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        return taken

    def wake(self) -> None:
        """Ends the present or next `wait`: the loop has something to do."""
        self._arrived.set()

    def wait(self, timeout_s: float) -> bool:
        """Returns whether a ticket waits or `wake` was called within `timeout_s`."""
        return self._arrived.wait(timeout_s)

    def close(self) -> None:
        self._closed = True
        for ticket in self.take():
            outcome = ticket.turn.outcome if isinstance(ticket, TurnTicket) else ticket.outcome
            fail(outcome, EpisodeMoved("the rollout is leaving"))


def resolve_soon(
    loop: asyncio.AbstractEventLoop,
    waiting: "dict[str, list[asyncio.Future[Turn]]]",
    digest: str,
    outcome: "Future[Turn]",
) -> None:
    """Lets the endpoint's loop answer all that wait for a turn (`waiting`, by digest); for the
    thread that ended it, once the log has it.
    """
    # One wake-up, whose callback resolves all futures of the turn.
    with suppress(RuntimeError):  # the endpoint's loop is closed
        loop.call_soon_threadsafe(_resolve, waiting, digest, outcome)


def _resolve(
    waiting: "dict[str, list[asyncio.Future[Turn]]]", digest: str, outcome: "Future[Turn]"
) -> None:
    error = outcome.exception()
    for future in waiting.pop(digest):
        if future.done():  # its client went away
            continue
        if error is None:
            future.set_result(outcome.result())
        else:
            future.set_exception(error)
