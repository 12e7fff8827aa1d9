"""Serves the programs of episodes by HTTP (`endpoint_app`): OpenAI's routes and vLLM's token route,
each also below `/sessions/{id}`, and the routes that open a session, set its reward and end it.

The endpoint's thread finds the episode by its key, plans the tokens of a request, and waits for the
rollout's loop, which alone changes episodes. A request that was answered before gets the stored
answer, and equal requests at the same time share one. Others are generated together.

If the episode is not open here, the log decides. It has ended: a repeated end or reward gets its
first answer, anything else 409. A rollout is to take it up: 503, ask again.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from rollstream.errors import RollstreamError
from rollstream.producers.agent_settings import service_key
from rollstream.producers.agents.answers import (
    TurnAnswer,
    answer_events,
    answer_json,
    error_body,
    error_event,
    refusal_code,
)
from rollstream.producers.agents.conversation import PlannedPrompt
from rollstream.producers.agents.episode import Episode, PendingTurn, stored_answer
from rollstream.producers.agents.episodes import AgentEpisodes
from rollstream.producers.agents.fates import EpisodeEnd, EpisodeFates
from rollstream.producers.agents.inbox import (
    EndTicket,
    OpenTicket,
    RewardTicket,
    Ticket,
    TurnTicket,
    resolve_soon,
)
from rollstream.producers.agents.keys import SessionIdentity
from rollstream.producers.agents.requests import (
    BodyTooLarge,
    EndpointBusy,
    EpisodeMoved,
    LimitReached,
    RequestRefused,
    Route as RouteName,
    SessionKeyRefused,
    SessionSealed,
    TurnRequest,
    failure_in,
    read_request,
    refuse_unknown,
    reward_in,
    scores_in,
)
from rollstream.producers.agents.serving import answer_unrouted
from rollstream.streams.branches import path_to
from rollstream.streams.foreign_text import ForeignValueRefused, read_json, reason_text
from rollstream.streams.records import GENERATED, Annotation
from rollstream.streams.values import Turn
from rollstream.streams.writer import publish

Outcome = TypeVar("Outcome")

log = logging.getLogger(__name__)
KEEPALIVE_S = 10.0  # of a stream whose answer is not there yet
TURNS_PER_EPISODE = 64  # requests of one episode that are answered together


@dataclass(slots=True)
class AgentEndpoint:
    """Answers the requests of programs, in the endpoint's event loop."""

    episodes: AgentEpisodes
    model: str
    """Name of the model in answers: that of the run."""
    context_max: int
    fates: EpisodeFates = field(init=False)

    def __post_init__(self) -> None:
        self.fates = EpisodeFates(self.episodes.parts.publisher.bus)

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        turns = [
            Route("/v1/chat/completions", self._turn("chat"), methods=["POST"]),
            Route("/v1/completions", self._turn("completion"), methods=["POST"]),
            Route("/v1/responses", self._turn("response"), methods=["POST"]),
            Route("/inference/v1/generate", self._turn("tokens"), methods=["POST"]),
            Route("/v1/models", self.models),
        ]
        return Starlette(
            routes=[
                *turns,
                Route("/health", self.health),
                Route("/sessions", self._guarded(self.open_session), methods=["POST"]),
                Route("/sessions/{id}/reward", self._guarded(self.set_reward), methods=["POST"]),
                Route("/sessions/{id}", self._guarded(self.end_session), methods=["DELETE"]),
                Mount("/sessions/{id}", routes=turns),
            ],
            exception_handlers={HTTPException: answer_unrouted},
        )

    # ---- routes --------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "episodes": len(self.episodes)})

    async def models(self, request: Request) -> Response:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "rollstream"}
        return JSONResponse({"object": "list", "data": [model]})

    async def open_session(self, request: Request) -> Response:
        """Give an episode that waits to an outside program; 204 if none waits."""
        check_service(request, self.episodes.settings.key_env)
        base = str(request.base_url).rstrip("/")  # a wrong Host header shall cost no episode
        ticket = OpenTicket()
        episode = await self._outcome(ticket, ticket.outcome)
        if episode is None:
            return Response(status_code=204)
        order = self.episodes.order_of(episode)
        return JSONResponse(
            {"id": episode.name, "key": order.key, "base_url": f"{base}/v1", "task": order.task}
        )

    async def set_reward(self, request: Request) -> Response:
        """Record the episode's reward; it ends when its program does, and until then another reward
        replaces it, with its scores. After its end the reward is final, unless the run takes late
        rewards: then the first one counts.
        """
        identity = self._identity(request)
        body = await self._body(request)
        refuse_unknown(body, "reward", "scores")
        reward, scores = reward_in(body), scores_in(body)
        if reward is None:
            raise RequestRefused("reward is missing")
        episode = self.episodes.find(identity)
        if episode is None:
            await self._reward_late(identity, reward)
            return Response(status_code=204)
        ticket = RewardTicket(episode, reward, scores)
        await self._outcome(ticket, ticket.outcome)
        return Response(status_code=204)

    async def end_session(self, request: Request) -> Response:
        """End the episode, with the reason of a failure in the body, or with a reward, which
        replaces an earlier one; without both, with the reward that it has.
        """
        identity = self._identity(request)
        body = await self._body(request)
        refuse_unknown(body, "reward", "scores", "failed")
        reason, reward, scores = failure_in(body), reward_in(body), scores_in(body)
        if scores and reward is None:
            raise RequestRefused("scores without a reward: they are recorded beside it")
        episode = self.episodes.find(identity)
        if episode is not None:
            ticket = EndTicket(episode, reward, reason, scores)
            await self._outcome(ticket, ticket.outcome)
        elif not (await self._end_of(identity)).agrees(reward, reason):
            raise SessionSealed(f"episode {identity.trajectory} has ended otherwise")
        return Response(status_code=204)

    async def _reward_late(self, identity: SessionIdentity, reward: float) -> None:
        """Record the reward of an episode that has ended without one."""
        end = await self._end_of(identity)
        if end.reward is None and not end.failure:
            values = np.array([reward], np.float32)
            name = self.episodes.parts.publisher.name
            note = Annotation(identity.trajectory, end.group, "reward", values, name)
            await asyncio.to_thread(publish, self.fates.bus, "annotations", str(end.group), note)
        elif not end.agrees(reward, ""):
            raise SessionSealed(f"episode {identity.trajectory} has ended: its reward is final")

    async def _end_of(self, identity: SessionIdentity) -> EpisodeEnd:
        """Returns how an episode that is not open here has ended. Raises `EpisodeMoved` if a
        rollout is to take it up, and `SessionSealed` if the log has no completion of it and no
        order.
        """
        name = identity.trajectory
        if (end := await asyncio.to_thread(self.fates.end_of, name)) is not None:
            return end
        if await asyncio.to_thread(self.fates.is_assigned, name):
            raise EpisodeMoved(f"episode {name} is not open on this rollout now; ask again")
        raise SessionSealed(f"episode {name} is not open")

    def _turn(self, route: RouteName) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            identity = self._identity(request)
            episode = self.episodes.find(identity)
            if episode is None:
                await self._end_of(identity)
                raise SessionSealed(f"episode {identity.trajectory} has ended")
            body = await self._body(request)
            sampling = episode.running.assignment.sampling
            key = request.headers.get("idempotency-key", "")
            asked = read_request(route, body, sampling, key)
            asked = replace(asked, model=self.model)
            if asked.is_streamed:
                turn = asyncio.ensure_future(self._answer(episode, asked))
                await asyncio.wait({turn}, timeout=KEEPALIVE_S)
                if turn.done():
                    turn.result()  # an error becomes a status
                return StreamingResponse(self._events(turn, asked), media_type="text/event-stream")
            whole = answer_json(asked, await self._answer(episode, asked))
            return Response(msgspec.json.encode(whole), media_type="application/json")

        return self._guarded(answer)

    async def _events(
        self, turn: "asyncio.Future[TurnAnswer]", asked: TurnRequest
    ) -> AsyncIterator[str]:
        """Yield comments until the answer is there, and then its events."""
        while not turn.done():
            yield ": generating\n\n"
            await asyncio.wait({turn}, timeout=KEEPALIVE_S)
        try:
            for event in answer_events(asked, turn.result()):
                yield event
        except Exception as error:  # noqa: BLE001 (the boundary of one request)
            yield error_event(self._noted(error))

    # ---- turns ---------------------------------------------------------------------------------

    async def _answer(self, episode: Episode, asked: TurnRequest) -> TurnAnswer:
        """Returns the answer: the stored one of an equal request, or a new turn's."""
        episode.check_open()
        turn = episode.conversation.answered(asked.digest)
        if turn is not None:
            self.episodes.counts.repeated += 1
            episode.reached.add(turn.digest)
        else:
            turn = await self._asked(episode, asked)
        return self._answer_of(episode, turn, asked)

    def _asked(self, episode: Episode, asked: TurnRequest) -> "asyncio.Future[Turn]":
        """Returns a future of the turn that answers this request; equal requests share the turn. A
        client that goes away cancels its own future alone.
        """
        waiting, own = episode.asked.get(asked.digest), asyncio.get_running_loop().create_future()
        if waiting is not None:
            self.episodes.counts.repeated += 1
            waiting.append(own)
            return own
        if len(episode.asked) >= TURNS_PER_EPISODE:
            raise EndpointBusy(f"{len(episode.asked)} requests of this episode are being answered")
        asked_s = self.episodes.parts.clock()
        pending = PendingTurn(asked, self._planned(episode, asked), asked_s)
        pending.outcome.add_done_callback(
            partial(resolve_soon, own.get_loop(), episode.asked, asked.digest)
        )
        episode.asked[asked.digest] = [own]
        try:
            self.episodes.inbox.put(TurnTicket(episode, pending))  # the loop runs from here on
        except EndpointBusy:
            del episode.asked[asked.digest]
            raise
        return own

    def _planned(self, episode: Episode, asked: TurnRequest) -> PlannedPrompt:
        """Returns the tokens that the request adds. Raises `LimitReached` if the context is
        full.
        """
        conversation = episode.conversation
        plan = conversation.plan(asked.messages, asked.tools, asked.prompt)
        length = conversation.path_length(plan)
        if not length:
            raise RequestRefused("the prompt has no tokens")
        if length >= self.context_max:
            episode.limit = f"context of {self.context_max} tokens used up"
            raise LimitReached(
                f"{length} tokens leave no room in the context of {self.context_max} "
                "(rollouts.context_max): context_length_exceeded"
            )
        return plan

    def _answer_of(self, episode: Episode, turn: Turn, asked: TurnRequest) -> TurnAnswer:
        """Returns a turn's answer with its tokens, as far as the request needs them."""
        held = episode.conversation.held
        path = path_to(turn.end - 1, held.branches)
        count = turn.end - turn.generated
        gained = held.tokens[turn.generated : turn.end].tolist()
        logprobs: list[float] = []
        pieces: list[str] = []
        if asked.with_logprobs:
            first = int(np.count_nonzero(held.sources[: turn.generated] == GENERATED))
            logprobs = held.logprobs[first : first + count].tolist()
            pieces = [episode.conversation.chat.decode([token]) for token in gained]
        return replace(
            stored_answer(turn),
            prompt_ids=held.tokens[path[:-count]].tolist(),
            token_ids=gained,
            logprobs=logprobs,
            pieces=pieces,
            created_s=episode.running.started_s,
        )

    async def _outcome(self, ticket: Ticket, outcome: "Future[Outcome]") -> Outcome:
        answered = asyncio.wrap_future(outcome)
        self.episodes.inbox.put(ticket)  # last: the loop runs from here on
        return await answered

    # ---- who asks ------------------------------------------------------------------------------

    def _identity(self, request: Request) -> SessionIdentity:
        """Returns the session of the key: the bearer's, or the one in the path."""
        name = request.path_params.get("id", "")
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else ""
        identity = self.episodes.keys.identity(key) or self.episodes.keys.identity(name)
        if identity is None:
            raise SessionKeyRefused(
                "send the session's key as the API key (Authorization: Bearer …)"
            )
        if (
            name
            and name not in (identity.trajectory, key)
            and self.episodes.keys.identity(name) != identity
        ):
            raise SessionKeyRefused("the key belongs to another session")
        return identity

    async def _body(self, request: Request) -> dict[str, Any]:
        """Returns the JSON object in the body, at most `body_bytes_max` bytes of it."""
        most, data = self.episodes.settings.body_bytes_max, bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > most:
                raise BodyTooLarge(f"a body of more than {most} bytes (agent.body_bytes_max)")
        try:
            body: Any = read_json(data) if data else {}
        except ForeignValueRefused as error:
            raise RequestRefused(f"the body cannot be read: {error}") from error
        if not isinstance(body, dict):
            raise RequestRefused("the body is not a JSON object")
        return body  # pyright: ignore[reportUnknownVariableType]

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Returns the route with its errors as statuses."""

        async def guarded(request: Request) -> Response:
            try:
                return await answer(request)
            except ClientDisconnect:  # there is no one to answer
                return Response(status_code=400)
            except asyncio.CancelledError:  # the endpoint closes
                return error_response(EpisodeMoved("the rollout is leaving"))
            except Exception as error:  # noqa: BLE001 (the boundary of one request)
                return error_response(self._noted(error))

        return guarded

    def _noted(self, error: Exception) -> RollstreamError:
        """Returns the error of a request, counted by its code. One that nothing foresaw is logged
        and becomes a `RequestRefused`: what one request does wrong ends that request.
        """
        refused = error
        if not isinstance(error, RollstreamError):
            log.error("a request could not be served", exc_info=error)
            refused = RequestRefused(
                f"this request cannot be served: {type(error).__name__}: {reason_text(error)}"
            )
        assert isinstance(refused, RollstreamError)
        code = "unforeseen" if refused is not error else refusal_code(refused)
        self.episodes.counts.refused[code] += 1
        return refused


def check_service(request: Request, variable: str) -> None:
    """Raise `SessionKeyRefused` if this client may not open sessions: it needs the key in the
    environment variable `agent.key_env`; without that setting, only programs of this machine may.
    """
    if not variable:
        if request.client is None or request.client.host not in ("127.0.0.1", "::1"):
            raise SessionKeyRefused("set agent.key_env to open sessions from other machines")
        return
    wanted = service_key(variable)
    given = request.headers.get("authorization", "").partition(" ")[2].strip()
    if not wanted or not hmac.compare_digest(given.encode(), wanted.encode()):
        raise SessionKeyRefused(f"send the key of ${variable} (agent.key_env)")


def error_response(error: RollstreamError) -> Response:
    """Returns the response of an error: its status, and its message in OpenAI's form."""
    status, body = error_body(error)
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    if status in (400, 401, 409, 413, 422):
        headers["x-should-retry"] = "false"
    return JSONResponse(body, status, headers)
