"""A host of the stranger's (`ForeignHost`) on a port of 127.0.0.1: it speaks enough of Kafka and
HTTP that a client sends its secrets, and records every byte it gets.

A Kafka client asks for the versions and the mechanism first, then it authenticates itself; after
that it is refused. HTTP requests are answered with 403. With `tls` the host has a
certificate that it signed itself, in the file `certificate`.
"""

import base64
import contextlib
import ssl
import struct
import subprocess
import threading
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from socket import create_connection, create_server, socket

from testbed.waiting import wait_for

READ_S = 10.0
KAFKA_BYTES_MAX = 1 << 20
API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE = 18, 17, 36
UNSUPPORTED_VERSION, AUTHENTICATION_FAILED = 35, 58
API_KEYS = 62
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
HTTP_METHODS = (b"GET ", b"PUT ", b"HEAD", b"POST", b"DELE", b"OPTI")
FORBIDDEN = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class ForeignHost:
    """Listens from construction until `close`. Use it as a context manager."""

    def __init__(self, folder: Path | None = None) -> None:
        self.received: list[bytes] = []
        self._threads: list[threading.Thread] = []
        self._served: set[tuple[str, int]] = set()
        self._tls: ssl.SSLContext | None = None
        self.certificate: Path | None = None
        if folder is not None:
            self.certificate = _make_certificate(folder)
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(self.certificate, folder / "key.pem")
        self._listening = create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    def settle(self) -> None:
        """Wait until everything is read that clients which have ended sent: connections are taken
        in their order, and a thread that serves one ends with it.
        """
        mark = create_connection(self._listening.getsockname())
        own = mark.getsockname()
        mark.close()
        wait_for(lambda: own in self._served)
        while self._threads:
            self._threads.pop().join(READ_S)

    def forget(self) -> None:
        self.received.clear()

    def seen(self, secrets: Sequence[str]) -> list[str]:
        """Returns the secrets among the received bytes, as they are or encoded."""
        data = b"".join(self.received)
        return [one for one in secrets if any(form in data for form in _forms(one))]

    def close(self) -> None:
        self._listening.close()

    def __enter__(self) -> "ForeignHost":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, client = self._listening.accept()
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()
                self._served.add(client)

    def _serve(self, connection: socket) -> None:
        with contextlib.suppress(OSError, ValueError, struct.error), connection:
            connection.settimeout(READ_S)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket) -> None:
        head = self._read(connection, 4)
        if head in HTTP_METHODS:
            self._keep(connection.recv(KAFKA_BYTES_MAX))
            connection.sendall(FORBIDDEN)
            return
        while True:
            (size,) = struct.unpack(">i", head)
            if not 0 <= size <= KAFKA_BYTES_MAX:
                return
            request = self._read(connection, size)
            key, version, number = struct.unpack(">hhi", request[:8])
            if key == API_VERSIONS:
                body = _versions(version)
            elif key == SASL_HANDSHAKE:
                body = _mechanisms()
            elif (
                key == SASL_AUTHENTICATE
            ):  # the secret has come; a refusal ends the client's retries
                body = struct.pack(">hhi", AUTHENTICATION_FAILED, -1, 0)
            else:
                return
            connection.sendall(struct.pack(">ii", 4 + len(body), number) + body)
            head = self._read(connection, 4)

    def _read(self, connection: socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = connection.recv(size - len(data))
            if not part:
                raise ValueError("the client ended the connection")
            self._keep(part)
            data += part
        return data

    def _keep(self, data: bytes) -> None:
        self.received.append(data)


def _versions(version: int) -> bytes:
    """Returns the body of a response: every request, in its versions 0 and 1."""
    keys = b"".join(struct.pack(">hhh", key, 0, 1) for key in range(API_KEYS))
    if version > 1:  # the client asks again in an older version
        return struct.pack(">hi", UNSUPPORTED_VERSION, API_KEYS) + keys
    throttle_ms = struct.pack(">i", 0) if version else b""
    return struct.pack(">hi", 0, API_KEYS) + keys + throttle_ms


def _mechanisms() -> bytes:
    names = b"".join(struct.pack(">h", len(name)) + name.encode() for name in MECHANISMS)
    return struct.pack(">hi", 0, len(MECHANISMS)) + names


def _forms(secret: str) -> tuple[bytes, ...]:
    data = secret.encode()
    # base64 of a text at any offset has the inner part of one of three encodings.
    encoded = tuple(base64.b64encode(b"x" * shift + data)[4:-4] for shift in range(3))
    return (data, urllib.parse.quote(secret).encode(), *encoded)


def _make_certificate(folder: Path) -> Path:
    """Writes a certificate for localhost and its key, and returns the certificate's path."""
    certificate = folder / "ca.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(certificate)]
    subprocess.run([*words, *names, *files], check=True, capture_output=True)
    return certificate
