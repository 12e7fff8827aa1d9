"""Listens for programs in a thread of the rollout's process (`EndpointThread`)."""

import asyncio
import socket
import threading
from typing import Any

import uvicorn

from rollstream.errors import ConfigurationError

CONNECTIONS_MAX = 4096
STOP_S = 2.0  # for answers on their way when the endpoint ends


class EndpointThread:
    """Serves an ASGI application at `host:port` from its start to `close`. Raises
    `ConfigurationError` if the address is unavailable.
    """

    def __init__(self, app: Any, address: str) -> None:
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
        settings = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(STOP_S),
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._run, name="agent-endpoint", daemon=True)

    def start(self) -> None:
        """Accept connections from now on."""
        self._thread.start()

    def _run(self) -> None:
        # uvicorn's choice: the loop of uvloop where it is installed, which takes .1 ms less a turn.
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        """Stop listening; answers on their way have a moment."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(2 * STOP_S)


def endpoint_url(address: str, port: int, host: str = "") -> str:
    """Return the URL under which programs reach an endpoint that listens at `address`."""
    listens = address.rpartition(":")[0]
    name = host or ("127.0.0.1" if listens in ("", "0.0.0.0") else listens)
    return f"http://{name}:{port}"
