"""Serves the explorer over HTTP (`ExplorerServer`): the page's files, the routes of `routes.py` as
JSON, and the events. `security.py` guards it.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rollstream.errors import ConfigurationError, NewerRelease, ObjectMissing, RollstreamError
from rollstream.http_connections import ConnectionBounds, bounded_protocol
from rollstream.look.explorer.assets import INDEX, PageAsset, load_assets
from rollstream.look.explorer.filters import WrongRequest
from rollstream.look.explorer.serving.events import CLIENTS_MAX, EventHub, encode_event
from rollstream.look.explorer.serving.routes import Explorer
from rollstream.look.explorer.serving.security import HEALTH, AccessRule, Guard, error_response

log = logging.getLogger(__name__)

# Answers that are computed or wait at a time, in `THREADS` threads; others get 429.
REQUESTS_MAX = 16
THREADS = 3
ANSWER_BYTES = 16 << 20
CONNECTIONS_MAX = 64
HEAD_BYTES = 32 << 10
SHUTDOWN_S = 1
KEEP_ALIVE_S = 15


class ExplorerApp:
    def __init__(self, explorer: Explorer, hub: EventHub) -> None:
        self._explorer, self._hub = explorer, hub
        self._assets = load_assets()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="answer")
        self._waiting = 0

    def application(self, rule: AccessRule) -> Guard:
        routes = [
            Route("/", self.index),
            Route("/page/{path:path}", self.asset),
            Route("/api/events", self.events),
            Route("/api/{path:path}", self.api),
            Route(HEALTH, self.health),
        ]
        handlers: Mapping[Any, Any] = {404: _not_found, 500: _failed}
        return Guard(Starlette(routes=routes, exception_handlers=handlers), rule)

    async def index(self, request: Request) -> Response:
        return self._send(request, INDEX)

    async def asset(self, request: Request) -> Response:
        return self._send(request, request.path_params["path"])

    async def health(self, request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def api(self, request: Request) -> Response:
        if self._waiting >= REQUESTS_MAX:
            return error_response(429, "too many requests at once", {"Retry-After": "1"})
        query = dict(request.query_params)
        if len(query) != len(request.query_params.multi_items()):
            return error_response(400, "a parameter is given twice")
        query.pop("token", None)
        path = request.scope["raw_path"].decode("latin-1").partition("?")[0].removeprefix("/api/")
        self._explorer.watch()
        # Only the loop's thread counts, so no lock is needed.
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            data = await loop.run_in_executor(self._threads, self._explorer.answer, path, query)
        except (RollstreamError, OSError) as error:
            return _refused(error)
        finally:
            self._waiting -= 1
        if len(data) > ANSWER_BYTES:
            return error_response(413, f"the answer has {len(data):,} bytes: ask for less")
        return Response(data, media_type="application/json")

    async def events(self, request: Request) -> Response:
        """Streams the events, after the present state of each run."""
        if self._hub.clients >= CLIENTS_MAX:
            return error_response(429, "too many pages are open", {"Retry-After": "5"})
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        first = [encode_event("change", run.change()) for run in self._explorer.runs]
        first += [
            encode_event("index", {"run": run.number, **run.index.progress.line()})
            for run in self._explorer.runs
        ]
        stream = self._hub.stream(first, self._explorer.watch)
        return StreamingResponse(stream, media_type="text/event-stream")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _send(self, request: Request, name: str) -> Response:
        asset = self._assets.get(name)
        if asset is None:
            return error_response(404, "the page has no such file")
        headers = {"ETag": asset.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        body = _body(asset, request, headers)
        return Response(body, media_type=asset.kind, headers=headers)


def _body(asset: PageAsset, request: Request, headers: dict[str, str]) -> bytes:
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return asset.compressed
    return asset.data


def _refused(error: Exception) -> Response:
    match error:
        case WrongRequest():
            return error_response(400, str(error))
        case ObjectMissing():
            return error_response(404, str(error))
        case ConfigurationError() | NewerRelease():
            return error_response(400, str(error))
        case _:
            log.warning("a request failed: %s", error)
            return error_response(503, f"the run cannot be read now: {error}")


async def _not_found(request: Request, error: Exception) -> Response:
    return error_response(404, "there is no such page")


async def _failed(request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return error_response(500, "an error of the explorer; its log has the details")


class ExplorerServer:
    """`started` is called once the server accepts requests."""

    def __init__(
        self, explorer: Explorer, hub: EventHub, rule: AccessRule, started: Callable[[], None]
    ) -> None:
        self._app = ExplorerApp(explorer, hub)
        bounds = ConnectionBounds(CONNECTIONS_MAX, head_bytes_max=HEAD_BYTES)
        config = uvicorn.Config(
            self._app.application(rule),
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            http=bounded_protocol(bounds, "h11"),
            ws="none",
            loop="asyncio",
            limit_concurrency=CONNECTIONS_MAX + 1,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        self._server = _Uvicorn(config, hub, started)

    def run(self, bound: socket.socket) -> None:
        """Serve on the bound socket until `end` is called, or, in a main thread, until SIGINT or
        SIGTERM.
        """
        try:
            self._server.run(sockets=[bound])
        finally:
            self._app.close()
            bound.close()

    def end(self) -> None:
        """End `run` from another thread."""
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, hub: EventHub, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._hub, self._on_start = hub, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._hub.bind(asyncio.get_running_loop())
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Open streams would hold up the shutdown.
        self._hub.close()
        await super().shutdown(sockets)
