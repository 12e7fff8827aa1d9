"""The process in which a task's own code runs: questions come in on a pipe, answers go out, in the
same order.

It ends when its parent does, however that ended: a thread sees the pipe close even while a
judgement hangs, and code that also holds the interpreter's lock runs out of the CPU time of its
alarm. Started by `producers.rewards` as `python -m producers.reward_process TASK OPTIONS LIMIT_S`.
"""

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from traceback import extract_tb
from typing import Literal

import msgspec

from producers.tasks.base import Environment, Reply, Score, Task
from producers.tasks.registry import load_task
from streams.errors import ConfigurationError

_REASON_MAX = 300  # characters of an exception's message that travel into a record


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Judge the turns, or say what the environment replies to them."""

    kind: Literal["judge", "reply"]
    reference: str
    state: str
    turns: list[list[int]]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """`reward` with `scores`, or the environment's `tokens` and `state`, or why there
    is neither.
    """

    kind: Literal["score", "reply", "failed"]
    reward: float = 0.0
    scores: dict[str, float] = {}  # msgspec copies empty defaults
    tokens: tuple[int, ...] = ()
    state: str = ""
    reason: str = ""


def failed(reason: str) -> Answer:
    return Answer("failed", reason=reason[:_REASON_MAX])


def answer(task: Task, question: Question) -> Answer:
    """Run the task's code; whatever it raises or returns becomes an answer."""
    try:
        if question.kind == "judge":
            return _scored(task.judge(question.reference, question.turns))
        assert isinstance(task, Environment), f"task {task.name} has no reply()"
        return _replied(task.reply(question.reference, question.state, question.turns))
    except Exception as error:  # noqa: BLE001 (code of others: any failure is an outcome)
        frame = extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        return failed(f"{type(error).__name__} at {where}: {error}")


def _scored(score: object) -> Answer:
    if not isinstance(score, Score):
        return failed(f"judge() returned a {type(score).__name__}, not a Score")
    scores = {name: float(value) for name, value in score.scores.items()}
    # A reward that is None or a string arrives here in spite of its type: the code is somebody
    # else's.
    if not isinstance(score.reward, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
        return failed(f"the reward is a {type(score.reward).__name__}, not a number")
    for name, value in {"the reward": float(score.reward), **scores}.items():
        if not math.isfinite(value):
            return failed(f"{name} is {value}")
    return Answer("score", float(score.reward), scores)


def _replied(reply: object) -> Answer:
    if not isinstance(reply, Reply):
        return failed(f"reply() returned a {type(reply).__name__}, not a Reply")
    return Answer("reply", tokens=tuple(reply.tokens), state=reply.state)


def _questions(source: int) -> Iterator[Question]:
    """What arrives on the pipe; the process exits at its end."""
    arrived: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        with open(source, "rb") as lines:
            for line in lines:
                arrived.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    decoder = msgspec.json.Decoder(Question)
    while True:
        yield decoder.decode(arrived.get())


def _own_pipes() -> tuple[int, int]:
    """Keep the pipes under other numbers: what a task prints goes to stderr, what it reads is
    empty.
    """
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return source, sink


def main(name: str, options: str, limit_s: str) -> None:
    """Greet (or say why not) once the task is built, then answer until the pipe closes."""
    source, sink = _own_pipes()
    encode = msgspec.json.Encoder().encode
    with open(sink, "wb", buffering=0) as out:
        try:
            task = load_task(name, json.loads(options))
        except ConfigurationError as error:
            out.write(encode(Answer("failed", reason=str(error))) + b"\n")
            return
        out.write(encode(Answer("score")) + b"\n")
        for question in _questions(source):
            # CPU seconds, twice what the parent grants: it matters only when there is no parent any
            # more.
            signal.setitimer(signal.ITIMER_VIRTUAL, 2 * float(limit_s) + 1)
            out.write(encode(answer(task, question)) + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
