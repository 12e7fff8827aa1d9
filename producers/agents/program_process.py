"""Orders and outcomes are JSON lines on stdin and stdout; the first, without a key, states that the
process is ready.
"""

import asyncio
import atexit
import faulthandler
import os
import resource
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from inspect import iscoroutinefunction, unwrap
from traceback import extract_tb
from typing import Any, cast

import msgspec

from rollstream.errors import ConfigurationError
from rollstream.import_path import find_function
from rollstream.producers.rewards.foreign_number import NoFiniteNumber, finite_number
from rollstream.producers.sandbox.base import SandboxRefused
from rollstream.producers.sandbox_settings import configure_sandboxes
from rollstream.producers.tasks.base import PlainSandbox, Score
from rollstream.program_output import OutputPipe, ProgramOutput
from rollstream.streams.foreign_text import reason_text

REASON_MAX = 300  # characters
RETRIES = 4  # of the client: a request waits for the rollout, and is answered once


class EpisodeOrder(msgspec.Struct, frozen=True):
    key: str
    base_url: str
    session_url: str
    task: Mapping[str, Any]


class EpisodeOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an episode ended; `refused`: the reason for which the function cannot be used at all."""

    key: str = ""
    reward: float | None = None
    scores: Mapping[str, float] = {}  # msgspec copies empty defaults
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
    """Returns the reward, with or without named scores, or None if the task judges."""
    # No time-out of its own: the rollout alone ends an episode (agent.episode_s).
    client = _client_class()(
        base_url=order.base_url,
        api_key=order.key,
        max_retries=RETRIES,
        timeout=None,
        http_client=http,
    )
    try:
        returned = await function(client, order.task)
        return EpisodeOutcome(order.key, *_reward_and_scores(returned))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Cancelled by the user's own code, which is a failure.
        return EpisodeOutcome(order.key, reason=failure_text(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's code: any failure counts)
        # Any exception is an outcome, `SystemExit` too: the process runs other episodes. Only a
        # machine without the sandbox ends the run.
        if refusal := _sandbox_refusal(error):
            return EpisodeOutcome(order.key, refused=str(refusal))
        return EpisodeOutcome(order.key, reason=failure_text(error))


@cache
def _client_class() -> type[Any]:
    from openai import AsyncOpenAI

    class EpisodeClient(AsyncOpenAI):
        async def close(self) -> None:
            """Leaves the connections open: all episodes of this process share them."""

    return EpisodeClient


def _sandbox_refusal(error: BaseException) -> SandboxRefused | None:
    # Task groups raise groups of errors.
    if isinstance(error, BaseExceptionGroup):
        errors = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return next(filter(None, map(_sandbox_refusal, errors)), None)
    return error if isinstance(error, SandboxRefused) else None


def _reward_and_scores(returned: object) -> tuple[float | None, dict[str, float]]:
    if returned is None:
        return None, {}
    reward, scores = returned, cast("object", {})
    if isinstance(returned, Score):
        reward, scores = returned.reward, returned.scores
    # A pair, as a verifier returns it.
    elif isinstance(returned, tuple) and len(cast("tuple[object, ...]", returned)) == 2:
        reward, scores = cast("tuple[object, object]", returned)
    if not isinstance(scores, Mapping):
        raise NoFiniteNumber("the returned scores are no dict of numbers by name")
    pairs = cast("Mapping[object, object]", scores).items()
    return finite_number(reward, "the returned reward"), {
        str(name): finite_number(value, f"the returned score {name!r}") for name, value in pairs
    }


def failure_text(error: BaseException) -> str:
    """Returns an exception of the user's code as text, with the place where it was raised."""
    if isinstance(error, NoFiniteNumber):
        return reason_text(str(error), REASON_MAX)
    frame = extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return reason_text(f"{type(error).__name__} at {where}: {reason_text(error)}", REASON_MAX)


def find_episode(path: str) -> Episode:
    """Raises `ConfigurationError` for a function that is missing, takes other arguments, or is no
    `async def`.
    """
    function = find_function(path, "agent.episode", ("client", "task"))
    forms = (function, unwrap(function), type(function).__call__)  # decorated, or an object
    if not any(map(iscoroutinefunction, forms)):
        raise ConfigurationError(
            f"agent.episode = {path!r} is no `async def`: an episode awaits its turns; write "
            f"`async def {path.rpartition(':')[2]}(client, task)`"
        )
    return cast("Episode", function)


class _EpisodeRunner:
    def __init__(
        self,
        function: Episode,
        http: Any,
        write: Callable[[bytes], None],
        printed: ProgramOutput,
    ) -> None:
        self._function, self._http, self._write, self._printed = function, http, write, printed
        self._running: dict[str, asyncio.Task[None]] = {}
        self._encode = msgspec.json.Encoder().encode

    def take(self, line: _Line) -> None:
        if line.cancel:
            task = self._running.get(line.cancel)
            if task is not None:
                task.cancel()
            # At once, though its code may continue: it shows that no episode blocks the loop which
            # they share.
            self._send(EpisodeOutcome(line.cancel, reason="cancelled"))
            return
        self._printed.allow()
        task = asyncio.get_running_loop().create_task(self._run(line))
        self._running[line.key] = task
        task.add_done_callback(lambda _: self._running.pop(line.key, None))

    async def _run(self, line: _Line) -> None:
        self._send(await run_episode(self._function, line, self._http))

    def _send(self, outcome: EpisodeOutcome) -> None:
        self._write(self._encode(outcome) + b"\n")


async def _serve(
    function: Episode, source: int, write: Callable[[bytes], None], printed: ProgramOutput
) -> None:
    from openai import DefaultAsyncHttpxClient

    http = DefaultAsyncHttpxClient(trust_env=False, timeout=None)
    loop, decode = asyncio.get_running_loop(), msgspec.json.Decoder(_Line).decode
    runner = _EpisodeRunner(function, http, write, printed)

    def read() -> None:
        with open(source, "rb") as lines:
            for line in lines:
                loop.call_soon_threadsafe(runner.take, decode(line))
        # Stdin ends with the rollout.
        os._exit(0)

    write(msgspec.json.encode(EpisodeOutcome()) + b"\n")  # the function is imported, the loop turns
    threading.Thread(target=read, daemon=True).start()
    await asyncio.Event().wait()


def _pass_on(printed: OutputPipe, stderr: int) -> None:
    # The rest, such as the traceback with which this process ends.
    for descriptor in (1, 2):
        os.dup2(stderr, descriptor)
    printed.close()


def main(path: str, sandbox: str) -> None:
    if sandbox:
        configure_sandboxes(msgspec.json.decode(sandbox, type=PlainSandbox))
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    stderr = os.dup(2)
    # On SIGABRT it prints the line that blocks the loop.
    faulthandler.enable(stderr, all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    printed = OutputPipe(stderr)
    for descriptor in (1, 2):  # what the user's code prints
        os.dup2(printed.writer, descriptor)
    atexit.register(_pass_on, printed, stderr)
    with open(sink, "wb", buffering=0) as out:
        try:
            function = find_episode(path)
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

        asyncio.run(_serve(function, source, write, printed.output))


if __name__ == "__main__":
    main(*sys.argv[1:3])
