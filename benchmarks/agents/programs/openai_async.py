"""Asks two times with the asynchronous client of the library openai, over the route of responses.
`python openai_async.py PROMPT`
"""

import asyncio
import sys
from typing import Any

from openai import AsyncOpenAI


async def main(prompt: str) -> None:
    async with AsyncOpenAI() as client:
        items: list[Any] = [{"role": "user", "content": prompt}]
        for _ in range(2):
            answer = await client.responses.create(
                model="policy", input=items, max_output_tokens=10
            )
            items += [*answer.output, {"role": "user", "content": prompt}]


asyncio.run(main(sys.argv[1]))
