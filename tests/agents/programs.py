"""Programs of agents for tests; each is called as `episode(client, task)`."""

import asyncio
import threading
from typing import Any

from rollstream.producers.sandbox.base import SandboxRefused
from rollstream.producers.sandbox.factory import configured_limits


async def two_turns(client: Any, task: dict[str, Any]) -> float:
    """Asks twice; the reward is the share of answers with a letter of the reference."""
    messages = [{"role": "user", "content": task["prompt"]}]
    good = 0
    for _ in range(2):
        answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=4)
        text = answer.choices[0].message.content or ""
        good += any(letter in str(task["reference"]) for letter in text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "+1="}]
    return good / 2


async def judged(client: Any, task: dict[str, Any]) -> None:
    """Leaves the reward to the task."""
    await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": task["prompt"]}]
    )


async def failing(client: Any, task: dict[str, Any]) -> float:
    await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "a"}], max_tokens=2
    )
    raise ValueError("the tool broke")


async def hanging(client: Any, task: dict[str, Any]) -> float:
    await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "a"}], max_tokens=2
    )
    await asyncio.Event().wait()
    return 0.0


async def silent(client: Any, task: dict[str, Any]) -> float:
    return 1.0


async def blocking(client: Any, task: dict[str, Any]) -> float:
    """Makes the mistake of a call that takes long without `await`."""
    await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "a"}], max_tokens=2
    )
    threading.Event().wait()
    return 0.0


async def named(client: Any, task: dict[str, Any]) -> Any:
    """Is the function of this module that the episode's reference names."""
    return await globals()[str(task["reference"])](client, task)


async def sandbox_limit(client: Any, task: dict[str, Any]) -> float:
    """Returns the time limit of the sandboxes that it would open."""
    await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "a"}], max_tokens=2
    )
    return configured_limits().time_s


async def closing(client: Any, task: dict[str, Any]) -> float:
    """Closes its client, as programs of the library openai do."""
    async with client:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a"}], max_tokens=2
        )
    return 1.0


async def scored(client: Any, task: dict[str, Any]) -> tuple[float, dict[str, float]]:
    await closing(client, task)
    return 0.5, {"steps": 3.0}


async def misscored(client: Any, task: dict[str, Any]) -> Any:
    await closing(client, task)
    return 0.5, {"": 3.0}


async def unsandboxed(client: Any, task: dict[str, Any]) -> float:
    """Needs a sandbox that this machine does not have, as one of several things at once."""

    async def refused() -> None:
        raise SandboxRefused("there is no program `bwrap`")

    async with asyncio.TaskGroup() as group:
        group.create_task(refused())
    return 1.0


_tries = 0


async def flaky(client: Any, task: dict[str, Any]) -> float:
    """Fails after its first turn when it is called first; then runs two turns."""
    global _tries
    _tries += 1
    if _tries == 1:
        return await failing(client, task)
    messages = [{"role": "user", "content": "a"}]
    answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=2)
    text = answer.choices[0].message.content or ""
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "b"}]
    await client.chat.completions.create(model="m", messages=messages, max_tokens=2)
    return 1.0


async def leaving(client: Any, task: dict[str, Any]) -> float:
    """Ends its process as a script does, while other episodes run in it."""
    raise SystemExit(3)


async def cancelled(client: Any, task: dict[str, Any]) -> float:
    """Lets the cancellation of something of its own through."""
    raise asyncio.CancelledError


async def beyond(client: Any, task: dict[str, Any]) -> Any:
    """Returns a number that is none for JSON."""
    return 10**400


async def lettered(client: Any, task: dict[str, Any]) -> Any:
    return "half an emoji: \ud83d" * 10_000


async def mute(client: Any, task: dict[str, Any]) -> float:
    """Raises an exception whose text cannot be had."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    raise Mute


async def halved(client: Any, task: dict[str, Any]) -> float:
    raise ValueError("tool said \ud83d")
