"""Asks an endpoint as many programs would, from a process of its own:
`python -m benchmarks.agents.asking [--in-turn] URL SECONDS TURN_TOKENS KEY…` runs one client per
key at the same time, at low priority, each in a loop of turns, and prints the seconds of each turn
as JSON. With `--in-turn` one client asks for the sessions in turn, at the usual priority, over one
socket: a library for HTTP would add its own cost to each turn.
"""

import asyncio
import json
import os
import re
import socket
import sys
import time
from typing import Any

import httpx2


async def turns_of(
    client: httpx2.AsyncClient, url: str, key: str, end_s: float, tokens: int
) -> list[float]:
    """Returns the seconds of each turn of one session, until `end_s`."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    found: list[float] = []
    while time.monotonic() < end_s:
        began = time.monotonic()
        answer = await client.post(
            f"{url}/v1/chat/completions",
            headers={"authorization": f"Bearer {key}"},
            json={"model": "m", "messages": messages, "max_tokens": tokens},
        )
        if answer.status_code != 200:
            break
        found.append(time.monotonic() - began)
        message = answer.json()["choices"][0]["message"]
        messages += [{"role": "assistant", "content": message["content"]},
                     {"role": "user", "content": "on"}]  # fmt: skip
    return found


async def together(url: str, seconds: float, tokens: int, keys: list[str]) -> list[list[float]]:
    """Returns the seconds of each turn, by session; all sessions ask at the same time."""
    limits = httpx2.Limits(max_connections=4096, max_keepalive_connections=4096)
    async with httpx2.AsyncClient(timeout=None, trust_env=False, limits=limits) as client:
        end_s = time.monotonic() + seconds
        return await asyncio.gather(*(turns_of(client, url, key, end_s, tokens) for key in keys))


def one_by_one(url: str, seconds: float, tokens: int, keys: list[str]) -> list[tuple[str, float]]:
    """Returns the id and the seconds of each turn of sessions that ask one after the other, from
    the first byte of the request to the last byte of the answer. Requests are made, and answers
    parsed, outside of that time.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    found: list[tuple[str, float]] = []
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            request = request_bytes(keys[len(found) % len(keys)], tokens)
            began = time.monotonic()
            connection.sendall(request)
            head, body = answer_of(connection)
            took = time.monotonic() - began
            assert head.startswith(b"HTTP/1.1 200 "), head + body
            found.append((json.loads(body)["id"], took))
    return found


def request_bytes(key: str, tokens: int) -> bytes:
    """Returns a request for a turn of a conversation of its own."""
    body = json.dumps(
        {"model": "m", "max_tokens": tokens, "user": str(time.monotonic()),
         "messages": [{"role": "user", "content": "go"}]}
    ).encode()  # fmt: skip
    lines = ("POST /v1/chat/completions HTTP/1.1", "Host: localhost",
             f"Authorization: Bearer {key}", "Content-Type: application/json",
             f"Content-Length: {len(body)}")  # fmt: skip
    return "\r\n".join((*lines, "", "")).encode() + body


def answer_of(connection: socket.socket) -> tuple[bytes, bytes]:
    """Returns head and body of the next response, which states its length."""
    data = b""
    while True:
        head, _, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *([0-9]+)", head)
        if length and len(body) >= int(length[1]):
            return head, body
        more = connection.recv(1 << 16)
        assert more, data
        data += more


if __name__ == "__main__":
    in_turn = sys.argv[1] == "--in-turn"
    os.nice(0 if in_turn else 19)
    address, limit, count, *sessions = sys.argv[1 + in_turn :]
    given = address, float(limit), int(count), sessions
    print(json.dumps(one_by_one(*given) if in_turn else asyncio.run(together(*given))))
