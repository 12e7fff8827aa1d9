"""Runs a task's `async def reply` for many dialogues at once: `python -m
rollstream.producers.rewards.environment SETTINGS` (as JSON). This process alone owns a reply's
deadline.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable
from typing import Literal, cast

import msgspec

from rollstream.errors import ConfigurationError, SandboxRefused
from rollstream.producers.rewards.process import (
    RewardAnswer,
    claim_pipes,
    error_answer,
    failed_answer,
    reply_answer,
)
from rollstream.producers.sandbox_settings import configure_sandboxes
from rollstream.producers.tasks.base import Environment, PlainTask
from rollstream.producers.tasks.registry import load_task


class ReplyQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the reply to the last of `turns`; `cancelled` ends the question of this number,
    which then has no answer.
    """

    number: int
    reference: str = ""
    state: str = ""
    turns: list[list[int]] = []
    cancelled: bool = False


class NumberedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`tokens` and new `state`, or the `reason` why there is no reply; `refused`: no call of this
    task can succeed on this machine. A process's first line has number 0.
    """

    number: int
    kind: Literal["reply", "failed", "refused"]
    tokens: tuple[int, ...] = ()
    state: str = ""
    reason: str = ""


class ReplyLoop:
    def __init__(self, environment: Environment, limit_s: float, sink: int) -> None:
        self._environment, self._limit_s, self._sink = environment, limit_s, sink
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._encoder = msgspec.json.Encoder()

    async def run(self, source: int) -> None:
        loop, decoder = asyncio.get_running_loop(), msgspec.json.Decoder(ReplyQuestion)

        def read() -> None:
            with open(source, "rb") as lines:
                for line in lines:
                    loop.call_soon_threadsafe(self._begin, decoder.decode(line))
            os._exit(0)

        threading.Thread(target=read, daemon=True).start()
        await asyncio.Event().wait()

    def write(self, number: int, answer: RewardAnswer) -> None:
        kind = answer.kind if answer.kind in ("reply", "refused") else "failed"
        line = NumberedAnswer(number, kind, answer.tokens, answer.state, answer.reason)
        data = self._encoder.encode(line) + b"\n"
        while data:
            data = data[os.write(self._sink, data) :]

    def _begin(self, question: ReplyQuestion) -> None:
        if question.cancelled:
            task = self._tasks.pop(question.number, None)
            if task is not None:
                task.cancel()
            return
        self._tasks[question.number] = asyncio.get_running_loop().create_task(
            self._answer(question)
        )

    async def _answer(self, question: ReplyQuestion) -> None:
        try:
            answer = await self._reply(question)
        except asyncio.CancelledError:
            if question.number not in self._tasks:
                # The pool cancelled it, so it has no answer.
                return
            answer = failed_answer("reply() was cancelled by the task's own code")
        if self._tasks.pop(question.number, None) is not None:
            self.write(question.number, answer)

    async def _reply(self, question: ReplyQuestion) -> RewardAnswer:
        limit = asyncio.timeout(self._limit_s)
        try:
            reply = self._environment.reply(question.reference, question.state, question.turns)
            async with limit:
                return reply_answer(await cast("Awaitable[object]", reply))
        except SandboxRefused as error:
            return RewardAnswer("refused", reason=str(error))
        except Exception as error:  # noqa: BLE001 (the task's code: any failure is an outcome)
            if isinstance(error, TimeoutError) and limit.expired():
                return failed_answer(f"took longer than {self._limit_s:g} s")
            return error_answer(error)


def main(settings: str) -> None:
    """Writes a greeting, with the reason if the task cannot be built, then answers until the pipe
    closes.
    """
    description = msgspec.json.decode(settings, type=PlainTask)
    configure_sandboxes(description.sandbox)
    source, sink = claim_pipes()
    encode = msgspec.json.Encoder().encode
    try:
        task = load_task(description)
    except ConfigurationError as error:
        os.write(sink, encode(NumberedAnswer(0, "failed", reason=str(error))) + b"\n")
        return
    assert isinstance(task, Environment), f"task {task.name} has no reply()"
    os.write(sink, encode(NumberedAnswer(0, "reply")) + b"\n")
    asyncio.run(ReplyLoop(task, description.reply_timeout_s, sink).run(source))


if __name__ == "__main__":
    main(*sys.argv[1:])
