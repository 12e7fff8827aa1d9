"""Listens for programs in a thread of the rollout's process. Requests of web pages are refused: a
page could open a session, read its key and set rewards.
"""

import asyncio
import socket
import threading

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollstream.errors import ConfigurationError
from rollstream.http_connections import ConnectionBounds, bounded_protocol, connections_allowed
from rollstream.http_guard import HostRule, program_rule

CONNECTIONS_MAX = 4096
SHOWN_MAX = 200  # characters of a path in a message
STOP_S = 2.0  # for answers on their way when the endpoint ends


class GuardedApp:
    """Passes the requests that a rule admits on to an ASGI application, and refuses others."""

    def __init__(self, app: ASGIApp, rule: HostRule) -> None:
        self._app, self._rule = app, rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = ""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            refusal = self._rule.refusal(
                headers.getlist("host"),
                headers.getlist("origin"),
                headers.get("sec-fetch-site", ""),
                headers.get("sec-fetch-mode", ""),
            )
        if refusal:
            error = {"message": refusal, "type": "rollstream", "code": "host_refused"}
            await JSONResponse({"error": error}, 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def answer_unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"no route {request.method} {request.url.path[:SHOWN_MAX]}"
    if error.status_code == 405:
        message += f"; it takes {(error.headers or {}).get('Allow', 'other methods')}"
    body = {"error": {"message": message, "type": "rollstream", "code": "no_route"}}
    headers = {**(error.headers or {}), "x-should-retry": "false"}
    return JSONResponse(body, error.status_code, headers)


class EndpointThread:
    """Serves an ASGI application from its start to `close`. Raises `ConfigurationError` if the
    address is unavailable.
    """

    def __init__(self, app: ASGIApp, address: str, name: str = "") -> None:
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_server((host or "0.0.0.0", int(port)), backlog=512)
        except OSError as error:
            raise ConfigurationError(
                f"agent.endpoint: cannot listen at {address}: {error}"
            ) from error
        # Accepted sockets inherit it. asyncio sets it only on sockets that name their protocol,
        # which those of `create_server` do not: answers then wait 40 ms for the client's ACK.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = int(self._socket.getsockname()[1])
        connections_max = connections_allowed(CONNECTIONS_MAX)
        settings = uvicorn.Config(
            GuardedApp(app, program_rule(host, [name])),
            http=bounded_protocol(ConnectionBounds(connections_max)),
            log_level="warning",
            access_log=False,
            lifespan="off",
            limit_concurrency=connections_max + 1,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(STOP_S),
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._run, name="agent-endpoint", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        # uvicorn's choice: the loop of uvloop where it is installed, which takes .1 ms less a turn.
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        """Stops listening; answers on their way have a moment."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(2 * STOP_S)


def endpoint_url(address: str, port: int, host: str = "") -> str:
    """Returns the URL under which programs reach an endpoint that listens at `address`."""
    listens = address.rpartition(":")[0]
    name = host or ("127.0.0.1" if listens in ("", "0.0.0.0") else listens)
    return f"http://{name}:{port}"
