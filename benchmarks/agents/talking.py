"""Opens episodes at an endpoint as they come, and runs each for some turns, many at a time:
`python -m benchmarks.agents.talking URL TURNS`. It echoes every answer in its next request, as
programs do. It ends when it is killed.
"""

import asyncio
import sys
from typing import Any

import httpx2

TOGETHER = 64


async def run(client: httpx2.AsyncClient, url: str, turns: int) -> None:
    """Runs one episode after the other."""
    while True:
        opened = await client.post(f"{url}/sessions")
        if opened.status_code != 200:
            await asyncio.sleep(0.02)
            continue
        session = opened.json()
        headers = {"authorization": f"Bearer {session['key']}"}
        messages: list[dict[str, Any]] = [{"role": "user", "content": session["task"]["prompt"]}]
        for number in range(turns):
            body = {"model": "m", "messages": messages}
            found = await client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            if found.status_code != 200:
                break
            text = found.json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": text},
                         {"role": "user", "content": f"go on, {number}"}]  # fmt: skip
        await client.request(
            "DELETE", f"{url}/sessions/{session['id']}", json={"reward": 1.0}, headers=headers
        )


async def main(url: str, turns: int) -> None:
    limits = httpx2.Limits(max_connections=256, max_keepalive_connections=256)
    async with httpx2.AsyncClient(timeout=None, trust_env=False, limits=limits) as client:
        await asyncio.gather(*(run(client, url, turns) for _ in range(TOGETHER)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
