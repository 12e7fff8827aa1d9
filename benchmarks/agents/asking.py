"""Asks an endpoint as many programs would, from a process of its own:
`python -m benchmarks.agents.asking [--in-turn] URL SECONDS TURN_TOKENS KEY…` runs one client per
key at the same time, at low priority, each in a loop of turns, and prints the seconds of each turn
as JSON. With `--in-turn` one client asks for the sessions in turn, at the usual priority.
"""

import asyncio
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


async def _all(url: str, seconds: float, tokens: int, keys: list[str], in_turn: bool) -> None:
    limits = httpx2.Limits(max_connections=4096, max_keepalive_connections=4096)
    async with httpx2.AsyncClient(timeout=None, trust_env=False, limits=limits) as client:
        if in_turn:
            found: list[Any] = []
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                for key in keys:
                    began = time.monotonic()
                    body = {"model": "m", "max_tokens": tokens, "user": str(began),
                            "messages": [{"role": "user", "content": "go"}]}  # fmt: skip
                    answer = await client.post(
                        f"{url}/v1/chat/completions", json=body,
                        headers={"authorization": f"Bearer {key}"},
                    )  # fmt: skip
                    if answer.status_code == 200:
                        found.append((answer.json()["id"], time.monotonic() - began))
        else:
            end_s = time.monotonic() + seconds
            found = await asyncio.gather(
                *(turns_of(client, url, key, end_s, tokens) for key in keys)
            )
    print(json.dumps(found))


if __name__ == "__main__":
    in_turn = sys.argv[1] == "--in-turn"
    os.nice(0 if in_turn else 19)
    address, limit, count, *sessions = sys.argv[1 + in_turn :]
    asyncio.run(_all(address, float(limit), int(count), sessions, in_turn))
