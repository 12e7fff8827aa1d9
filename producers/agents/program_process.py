"""Runs episodes of a user's async function in a process of its own, many at a time:
`python -m rollstream.producers.agents.program_process FUNCTION SANDBOX`. `programs.py` starts it;
SANDBOX has the settings of the sandboxes that the function opens, as JSON.

Orders arrive as JSON lines on stdin, outcomes leave as JSON lines on stdout. The function is called
as `episode(client, task)`: `client` is an `AsyncOpenAI` of the library openai whose requests belong
to this episode, `task` a dictionary. It returns the reward, or None if the task judges. Each
exception is an outcome with a reason. When stdin ends, the process exits.
"""

import asyncio
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from traceback import extract_tb
from typing import Any, cast

import msgspec

from rollstream.errors import ConfigurationError
from rollstream.import_path import find_callable
from rollstream.producers.sandbox.factory import configure, plan_of
from rollstream.producers.tasks.base import PlainSandbox

REASON_MAX = 300  # characters
RETRIES = 4  # of the client: a request waits for the rollout, and is answered once


class EpisodeOrder(msgspec.Struct, frozen=True):
    """Orders one episode: its session's `key`, the URLs of the endpoint and of the session, and the
    task that the program gets.
    """

    key: str
    base_url: str
    session_url: str
    task: Mapping[str, Any]


class EpisodeOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds how an episode ended. `refused` states why the function cannot be used at all."""

    key: str = ""
    reward: float | None = None
    reason: str = ""
    refused: str = ""


class _Line(msgspec.Struct):
    """One line on stdin: an order, or the key of an episode to cancel."""

    key: str = ""
    base_url: str = ""
    session_url: str = ""
    task: dict[str, Any] = {}  # msgspec copies empty defaults
    cancel: str = ""


Episode = Callable[[Any, dict[str, Any]], Awaitable[object]]


async def run_episode(function: Episode, order: _Line, http: Any) -> EpisodeOutcome:
    """Call the function for one episode; any exception of it becomes an outcome."""
    from openai import AsyncOpenAI

    # No time-out of its own: the rollout alone ends an episode (agent.episode_s).
    client = AsyncOpenAI(
        base_url=order.base_url,
        api_key=order.key,
        max_retries=RETRIES,
        timeout=None,
        http_client=http,
    )
    try:
        reward = await function(client, order.task)
    except Exception as error:  # noqa: BLE001 (the user's code: any failure is an outcome)
        frame = extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        reason = f"{type(error).__name__} at {where}: {error}"[:REASON_MAX]
        return EpisodeOutcome(order.key, reason=reason.encode(errors="replace").decode())
    if reward is None:
        return EpisodeOutcome(order.key)
    if not isinstance(reward, Real) or not math.isfinite(float(reward)):
        return EpisodeOutcome(order.key, reason=f"it returned {reward!r}, not a finite number")
    return EpisodeOutcome(order.key, float(reward))


class _EpisodeRunner:
    """Runs the ordered episodes as tasks of one event loop."""

    def __init__(self, function: Episode, http: Any, write: Callable[[bytes], None]) -> None:
        self._function, self._http, self._write = function, http, write
        self._running: dict[str, asyncio.Task[None]] = {}
        self._encode = msgspec.json.Encoder().encode

    def take(self, line: _Line) -> None:
        """Start an episode, or cancel one."""
        if line.cancel:
            task = self._running.get(line.cancel)
            if task is not None:
                task.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._run(line))
        self._running[line.key] = task
        task.add_done_callback(lambda _: self._running.pop(line.key, None))

    async def _run(self, line: _Line) -> None:
        outcome = await run_episode(self._function, line, self._http)
        self._write(self._encode(outcome) + b"\n")


async def _serve(function: Episode, source: int, write: Callable[[bytes], None]) -> None:
    from openai import DefaultAsyncHttpxClient

    http = DefaultAsyncHttpxClient(trust_env=False, timeout=None)
    loop, decode = asyncio.get_running_loop(), msgspec.json.Decoder(_Line).decode
    runner = _EpisodeRunner(function, http, write)

    def read() -> None:
        with open(source, "rb") as lines:
            for line in lines:
                loop.call_soon_threadsafe(runner.take, decode(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    await asyncio.Event().wait()


def main(path: str, sandbox: str) -> None:
    """Import the function and run its episodes until the pipe closes."""
    if sandbox:
        configure(plan_of(msgspec.json.decode(sandbox, type=PlainSandbox)))
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what the user's code prints goes to stderr
    with open(sink, "wb", buffering=0) as out:
        try:
            function = cast("Episode", find_callable(path, "agent.episode"))
            import openai  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ConfigurationError as error:
            out.write(msgspec.json.encode(EpisodeOutcome(refused=str(error))) + b"\n")
            return
        except ImportError as error:
            reason = f"agent.episode needs the library openai (pip install openai): {error}"
            out.write(msgspec.json.encode(EpisodeOutcome(refused=reason)) + b"\n")
            return

        def write(line: bytes) -> None:
            out.write(line)

        asyncio.run(_serve(function, source, write))


if __name__ == "__main__":
    main(*sys.argv[1:3])
