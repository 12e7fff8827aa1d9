"""Serves the programs of episodes by HTTP: OpenAI's routes and vLLM's token route, each also below
`/sessions/{id}`, and those of sessions. This thread plans a request's tokens; only the rollout's
loop changes episodes.
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
    episodes: AgentEpisodes
    model: str
    context_max: int
    fates: EpisodeFates = field(init=False)

    def __post_init__(self) -> None:
        self.fates = EpisodeFates(self.episodes.parts.publisher.bus)

    def app(self) -> Starlette:
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
        """Records the reward. Until the program's end another reward replaces it. Then it is final,
        unless the run takes late rewards: the first of them counts.
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
        """Ends the episode: as a failure with the body's reason, with its reward, or with an
        earlier one.
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
        end = await self._end_of(identity)
        # An end without a reward waits for a late one.
        if end.reward is None and not end.failure:
            values = np.array([reward], np.float32)
            name = self.episodes.parts.publisher.name
            note = Annotation(identity.trajectory, end.group, "reward", values, name)
            await asyncio.to_thread(publish, self.fates.bus, "annotations", str(end.group), note)
        elif not end.agrees(reward, ""):
            raise SessionSealed(f"episode {identity.trajectory} has ended: its reward is final")

    async def _end_of(self, identity: SessionIdentity) -> EpisodeEnd:
        """Raises `EpisodeMoved` if a rollout is to take the episode up, `SessionSealed` without a
        known end.
        """
        name = identity.trajectory
        # The log decides: a repeated end or reward gets its first answer, anything else is refused.
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
            turn_request = read_request(route, body, sampling, key)
            turn_request = replace(turn_request, model=self.model)
            if turn_request.is_streamed:
                turn = asyncio.ensure_future(self._answer(episode, turn_request))
                await asyncio.wait({turn}, timeout=KEEPALIVE_S)
                if turn.done():
                    turn.result()  # an error becomes a status
                return StreamingResponse(
                    self._events(turn, turn_request), media_type="text/event-stream"
                )
            response = answer_json(turn_request, await self._answer(episode, turn_request))
            return Response(msgspec.json.encode(response), media_type="application/json")

        return self._guarded(answer)

    async def _events(
        self, turn: "asyncio.Future[TurnAnswer]", turn_request: TurnRequest
    ) -> AsyncIterator[str]:
        # Comments keep the connection alive until the answer is there.
        while not turn.done():
            yield ": generating\n\n"
            await asyncio.wait({turn}, timeout=KEEPALIVE_S)
        try:
            for event in answer_events(turn_request, turn.result()):
                yield event
        except Exception as error:  # noqa: BLE001 (the boundary of one request)
            yield error_event(self._noted(error))

    # ---- turns ---------------------------------------------------------------------------------

    async def _answer(self, episode: Episode, turn_request: TurnRequest) -> TurnAnswer:
        episode.check_open()
        turn = episode.conversation.answered(turn_request.digest)
        if turn is not None:
            # An equal request was answered before and gets the stored answer.
            self.episodes.counts.repeated += 1
            episode.reached.add(turn.digest)
        else:
            turn = await self._asked(episode, turn_request)
        return self._answer_of(episode, turn, turn_request)

    def _asked(self, episode: Episode, turn_request: TurnRequest) -> "asyncio.Future[Turn]":
        # Equal requests share one turn; a client that goes away cancels its own future alone.
        waiting, future = (
            episode.asked.get(turn_request.digest),
            asyncio.get_running_loop().create_future(),
        )
        if waiting is not None:
            self.episodes.counts.repeated += 1
            waiting.append(future)
            return future
        if len(episode.asked) >= TURNS_PER_EPISODE:
            raise EndpointBusy(f"{len(episode.asked)} requests of this episode are being answered")
        asked_s = self.episodes.parts.clock()
        pending = PendingTurn(turn_request, self._planned(episode, turn_request), asked_s)
        pending.outcome.add_done_callback(
            partial(resolve_soon, future.get_loop(), episode.asked, turn_request.digest)
        )
        episode.asked[turn_request.digest] = [future]
        try:
            self.episodes.inbox.put(TurnTicket(episode, pending))  # the loop runs from here on
        except EndpointBusy:
            del episode.asked[turn_request.digest]
            raise
        return future

    def _planned(self, episode: Episode, turn_request: TurnRequest) -> PlannedPrompt:
        conversation = episode.conversation
        plan = conversation.plan(turn_request.messages, turn_request.tools, turn_request.prompt)
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

    def _answer_of(self, episode: Episode, turn: Turn, turn_request: TurnRequest) -> TurnAnswer:
        content = episode.conversation.held
        path = path_to(turn.end - 1, content.branches)
        count = turn.end - turn.generated
        gained = content.tokens[turn.generated : turn.end].tolist()
        logprobs: list[float] = []
        pieces: list[str] = []
        if turn_request.with_logprobs:
            # Log-probabilities are those of generated tokens alone.
            first = int(np.count_nonzero(content.sources[: turn.generated] == GENERATED))
            logprobs = content.logprobs[first : first + count].tolist()
            pieces = [episode.conversation.chat.decode([token]) for token in gained]
        return replace(
            stored_answer(turn),
            prompt_ids=content.tokens[path[:-count]].tolist(),
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
        name = request.path_params.get("id", "")
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else ""
        # The key is the bearer's, or the one in the path.
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
        bytes_max, data = self.episodes.settings.body_bytes_max, bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > bytes_max:
                raise BodyTooLarge(f"a body of more than {bytes_max} bytes (agent.body_bytes_max)")
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
        refused = error
        # An unforeseen error ends this request alone.
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
    """Raises `SessionKeyRefused` for a client without the key in the variable `agent.key_env`, or
    without that setting on another machine.
    """
    if not variable:
        if request.client is None or request.client.host not in ("127.0.0.1", "::1"):
            raise SessionKeyRefused("set agent.key_env to open sessions from other machines")
        return
    key = service_key(variable)
    sent_key = request.headers.get("authorization", "").partition(" ")[2].strip()
    if not key or not hmac.compare_digest(sent_key.encode(), key.encode()):
        raise SessionKeyRefused(f"send the key of ${variable} (agent.key_env)")


def error_response(error: RollstreamError) -> Response:
    status, body = error_body(error)
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    if status in (400, 401, 409, 413, 422):
        # The same request would fail again, so OpenAI's client shall not retry.
        headers["x-should-retry"] = "false"
    return JSONResponse(body, status, headers)
