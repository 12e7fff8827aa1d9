"""Asks an endpoint as many programs would, from a process of its own:
`python -m benchmarks.agents.asking [--in-turn] URL SECONDS TURN_TOKENS KEY…` runs one client per
key at the same time, at low priority, each in a loop of turns, and prints the seconds of each turn
as JSON. With `--in-turn` one client asks for the sessions in turn, at the usual priority, over one
connection of the standard library: a client of its own cost would add that to each turn.
"""

import asyncio
import http.client
import json
import os
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
    """Returns the id and the seconds of each turn of sessions that ask one after the other."""
    client = http.client.HTTPConnection(url.removeprefix("http://"))
    found: list[tuple[str, float]] = []
    end_s, asked = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        key, asked = keys[asked % len(keys)], asked + 1
        began = time.monotonic()
        body = {"model": "m", "max_tokens": tokens, "user": str(began),
                "messages": [{"role": "user", "content": "go"}]}  # fmt: skip
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        client.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
        answer = client.getresponse()
        text = answer.read()
        assert answer.status == 200, text
        found.append((json.loads(text)["id"], time.monotonic() - began))
    return found


if __name__ == "__main__":
    in_turn = sys.argv[1] == "--in-turn"
    os.nice(0 if in_turn else 19)
    address, limit, count, *sessions = sys.argv[1 + in_turn :]
    given = address, float(limit), int(count), sessions
    print(json.dumps(one_by_one(*given) if in_turn else asyncio.run(together(*given))))
