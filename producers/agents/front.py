"""The role `endpoint`: one address for the programs of all rollouts. While a rollout is replaced,
requests wait and are sent again; equal requests are answered once.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollstream.metric_values import MetricValues
from rollstream.producers.agents.directory import RolloutDirectory
from rollstream.producers.agents.endpoint import check_service, error_response
from rollstream.producers.agents.keys import SessionKeys
from rollstream.producers.agents.requests import SessionKeyRefused

log = logging.getLogger(__name__)
WAIT_S = 120.0  # longest wait for a rollout that runs the episode
PAUSE_S = 0.1
READ_S = 0.05  # between two reads of the log
_UNREACHABLE = (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError)
"""The errors of a request to a rollout that is gone, or whose status names no address."""
_METHODS = ["GET", "POST", "DELETE"]
_MOVING = b'"code":"moving"'  # in the event with which a rollout gives an episode up
_DROPPED = frozenset({"host", "content-length", "connection", "transfer-encoding"})


@dataclass(slots=True)
class EndpointFront:
    """Serves one address for the episodes of all rollouts. `body_bytes_max` bounds a body."""

    directory: RolloutDirectory
    keys: SessionKeys
    body_bytes_max: int
    key_env: str = ""
    wait_s: float = WAIT_S
    _client: httpx2.AsyncClient | None = None
    _next: int = 0
    forwarded: int = 0
    repeated: int = 0
    """Requests that were sent again, because a rollout was gone or gave the episode up."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _read_s: float = 0.0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/sessions", self._open, methods=["POST"]),
                Route("/{path:path}", self._forward, methods=_METHODS),
            ]
        )

    async def _health(self, request: Request) -> Response:
        await self._read()
        return JSONResponse({"status": "ok", "rollouts": len(self.directory.urls())})

    async def _open(self, request: Request) -> Response:
        try:
            check_service(request, self.key_env)
        except SessionKeyRefused as error:
            return error_response(error)
        await self._read()
        body = await self._body(request)
        urls = self.directory.urls()
        self._next += 1
        refused: Response | None = None
        # Each request begins at the next rollout.
        for index in range(len(urls)):
            url = urls[(self._next + index) % len(urls)]
            try:
                answer = await self._send("POST", f"{url}/sessions", request, body)
                data = await answer.aread()
            except _UNREACHABLE:
                continue
            if answer.status_code == 200:
                base = str(request.base_url).rstrip("/")
                return JSONResponse({**json.loads(data), "base_url": f"{base}/v1"})
            if answer.status_code != 204:
                refused = Response(data, answer.status_code, media_type="application/json")
        return refused or Response(status_code=204)

    async def _forward(self, request: Request) -> Response:
        trajectory = self._trajectory(request)
        if trajectory is None:
            return _error(401, "send the session's key as the API key", "invalid_api_key")
        body = await self._body(request)
        if body is None:
            return _error(413, f"a body of more than {self.body_bytes_max} bytes", "too_large")
        answer = await self._ask(trajectory, request, body)
        if isinstance(answer, Response):
            return answer
        events = self._events(answer, trajectory, request, body)
        return StreamingResponse(events, answer.status_code, _kept(answer))

    async def _events(
        self, answer: httpx2.Response, trajectory: str, request: Request, body: bytes
    ) -> AsyncIterator[bytes]:
        has_begun = False
        while True:
            try:
                async for chunk in answer.aiter_bytes():
                    # Before more than comments were sent, a rollout that is gone or gives the
                    # episode up is replaced: the request is sent again, and the stream continues.
                    if not has_begun and _MOVING in chunk:
                        break
                    has_begun = has_begun or not _is_comment(chunk)
                    yield chunk
                else:
                    return
            except _UNREACHABLE as error:
                if has_begun:
                    log.warning(
                        "episode %s: its rollout is gone within a stream: %s", trajectory, error
                    )
                    return
            self.repeated += 1
            next_answer = await self._ask(trajectory, request, body)
            if isinstance(next_answer, Response):
                yield b"data: " + bytes(next_answer.body) + b"\n\n"
                return
            answer = next_answer

    async def _ask(
        self, trajectory: str, request: Request, body: bytes
    ) -> Response | httpx2.Response:
        give_up = time.monotonic() + self.wait_s
        while True:
            await self._read()
            url = self.directory.url_of(trajectory)
            if url:
                answer = await self._try(url, request, body)
                if answer is not None:
                    return answer
                self.repeated += 1
            elif self.directory.is_released(trajectory):
                return _error(409, f"episode {trajectory} is no longer needed", "session_sealed")
            if time.monotonic() >= give_up:
                return _error(503, f"no rollout runs episode {trajectory} now", "moving")
            await asyncio.sleep(PAUSE_S)

    async def _try(
        self, url: str, request: Request, body: bytes
    ) -> Response | httpx2.Response | None:
        target = f"{url}{request.url.path}"
        try:
            answer = await self._send(request.method, target, request, body)
            # The rollout gave the episode up.
            if answer.status_code == 503:
                await answer.aread()
                return None
            if "text/event-stream" in answer.headers.get("content-type", ""):
                self.forwarded += 1
                return answer
            data = await answer.aread()
        except _UNREACHABLE:
            return None
        self.forwarded += 1
        return Response(data, answer.status_code, _kept(answer))

    async def _send(
        self, method: str, url: str, request: Request, body: bytes | None
    ) -> httpx2.Response:
        if self._client is None:
            limits = httpx2.Limits(max_connections=4096, max_keepalive_connections=1024)
            self._client = httpx2.AsyncClient(timeout=None, trust_env=False, limits=limits)
        headers = {k: v for k, v in request.headers.items() if k not in _DROPPED}
        sent = self._client.build_request(method, url, headers=headers, content=body or b"")
        return await self._client.send(sent, stream=True)

    def metric_values(self) -> MetricValues:
        return {
            "endpoint_requests_total": self.forwarded,
            "endpoint_repeated_total": self.repeated,
        }

    def _trajectory(self, request: Request) -> str | None:
        bearer = request.headers.get("authorization", "").partition(" ")[2].strip()
        parts = request.url.path.split("/")
        path_key = parts[2] if len(parts) > 2 and parts[1] == "sessions" else ""
        # The key is the bearer's, or the one in the path.
        identity = self.keys.identity(bearer) or self.keys.identity(path_key)
        return None if identity is None else identity.trajectory

    async def _body(self, request: Request) -> bytes | None:
        data = bytearray()
        with suppress(ClientDisconnect):  # the answer reaches no one
            async for chunk in request.stream():
                data += chunk
                if len(data) > self.body_bytes_max:
                    return None
        return bytes(data)

    async def _read(self) -> None:
        async with self._lock:
            # All requests share one read in `READ_S` seconds.
            if time.monotonic() - self._read_s >= READ_S:
                await asyncio.to_thread(self.directory.read)
                self._read_s = time.monotonic()


def _kept(answer: httpx2.Response) -> dict[str, str]:
    return {k: v for k, v in answer.headers.items() if k not in _DROPPED}


def _is_comment(chunk: bytes) -> bool:
    return all(not line or line.startswith(b":") for line in chunk.split(b"\n"))


def _error(status: int, message: str, code: str) -> Response:
    body: dict[str, Any] = {"error": {"message": message, "type": "rollstream", "code": code}}
    return JSONResponse(body, status)
