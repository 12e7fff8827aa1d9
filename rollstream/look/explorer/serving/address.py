"""Binds the explorer's address (`bind`)."""

import socket

from rollstream.errors import ConfigurationError
from rollstream.os_failures import explain_os_error

PORT = 7461  # tried first if no port is given


def bind(host: str, port: int | None) -> socket.socket:
    """Returns a bound socket: at `port`, or, with None, at `PORT` if it is free and else at any
    free one. Raises `ConfigurationError` if the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in (port,) if port is not None else (PORT, 0):
        listener = socket.socket(family, socket.SOCK_STREAM)
        # The port of an explorer that just ended may be bound again at once.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
        except OSError as error:
            listener.close()
            if candidate == PORT and port is None:
                continue
            raise ConfigurationError(f"{host}:{candidate}: {explain_os_error(error)}") from None
        return listener
    raise AssertionError("port 0 is always free")
