"""Programs of episodes for runs whose processes are killed (`run.py`). Each episode asks for
`TURNS` turns in each of two conversations, runs a command in a sandbox after each pair, and notes
every answer in a file.

`episode` and `wandering` are functions for `agent.episode`. `python -m testbed.agents.service URL`
is an outside service: it opens episodes at the address and runs up to `TOGETHER` of them.
"""

import asyncio
import base64
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import httpx2

from rollstream.producers.sandbox.factory import run

TURNS, TOKENS = 4, 6
TOGETHER = 8
PAUSE_S = 0.05
NOTES = "AGENT_NOTES"
"""Environment variable with the path of the file for answers."""


class SandboxKilled(RuntimeError):
    """Raised when a command in the sandbox has not ended by itself."""


async def turns(ask: Any, key: str, prompt: str, way: str = "") -> float:
    """Runs one episode of two conversations, which ask at the same time; `ask(messages)` returns
    the answer to a request. `way` is added to what the program says after the first turn.
    """
    talks = [[{"role": "user", "content": text}] for text in (prompt, f"aside {prompt}")]
    lengths = 0
    for number in range(TURNS):
        answers: list[Any] = await asyncio.gather(*map(ask, talks))
        texts = [answer["choices"][0]["message"]["content"] or "" for answer in answers]
        for answer, text in zip(answers, texts, strict=True):
            _note(key, answer["id"], text)
        command = ["/bin/sh", "-c", f"sleep 0.1; echo {number}"]
        found = await asyncio.to_thread(run, command)
        if not found.ok:
            raise SandboxKilled("the sandbox was killed")
        lengths += sum(map(len, texts))
        reply = found.stdout.decode().strip() + way
        for messages, text in zip(talks, texts, strict=True):
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": reply})
    return lengths % 7 / 7


def _note(key: str, answer: str, text: str) -> None:
    """Appends one line: the episode, its try, the answer's id and text."""
    payload = key.removeprefix("rs-").partition(".")[0]
    fields = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    line = json.dumps([fields[0], sum(fields[4:]), answer, text]) + "\n"
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(line)  # one write, so that lines of several processes do not mix


async def wandering(client: Any, task: dict[str, Any]) -> float:
    """Runs an episode that takes another way each time it is started."""
    return await episode(client, task, f"{random.random():.4f}")


async def episode(client: Any, task: dict[str, Any], way: str = "") -> float:
    """Runs an episode with the client of the library openai."""

    async def ask(messages: list[dict[str, str]]) -> Any:
        found = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=TOKENS
        )
        return found.model_dump()

    return await turns(ask, client.api_key, task["prompt"], way)


class _Ended(Exception):
    """Raised when the endpoint has sealed the session."""


class _Session:
    """Sends the requests of one session until they are answered."""

    def __init__(self, client: httpx2.AsyncClient, url: str, key: str, name: str) -> None:
        self._client, self._url = client, url
        self._headers = {"authorization": f"Bearer {key}"}
        self._path = f"/sessions/{name}"

    async def ask(self, messages: list[dict[str, str]]) -> Any:
        body = {"model": "m", "messages": messages, "max_tokens": TOKENS}
        return json.loads(await self._send("POST", "/v1/chat/completions", body))

    async def end(self, body: dict[str, Any]) -> None:
        await self._send("DELETE", self._path, body)

    async def _send(self, method: str, path: str, body: dict[str, Any]) -> bytes:
        while True:
            try:
                found = await self._client.request(
                    method, self._url + path, json=body, headers=self._headers
                )
            except httpx2.HTTPError:
                await asyncio.sleep(PAUSE_S)
                continue
            if found.status_code in (200, 204):
                return found.content
            if found.status_code not in (429, 502, 503):
                raise _Ended(found.text)
            await asyncio.sleep(PAUSE_S)


async def _serve(client: httpx2.AsyncClient, url: str) -> None:
    """Runs one episode after the other."""
    while True:
        try:
            opened = await client.post(f"{url}/sessions")
        except httpx2.HTTPError:
            opened = None
        if opened is None or opened.status_code != 200:
            await asyncio.sleep(PAUSE_S)
            continue
        order = opened.json()
        session = _Session(client, url, order["key"], order["id"])
        try:
            try:
                reward = await turns(session.ask, order["key"], order["task"]["prompt"])
            except SandboxKilled as error:
                await session.end({"failed": str(error)})
            else:
                await session.end({"reward": reward})
        except _Ended as error:
            print(order["id"], error, flush=True)


async def main(url: str) -> None:
    async with httpx2.AsyncClient(timeout=None, trust_env=False) as client:
        await asyncio.gather(*(_serve(client, url) for _ in range(TOGETHER)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
