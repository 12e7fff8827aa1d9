"""Runs a task's own code in a process of its own, and answers each question in order.

Questions arrive as JSON lines on stdin, and answers leave as JSON lines on stdout. Every exception
and every result of the code becomes a `RewardAnswer` of valid types. No result of a task, an
environment or a scorer's function can therefore end the role that asked.

The process ends when its parent ends, for any reason: a thread sees the pipe close even while a
judgement hangs, and a CPU-time alarm ends code that also holds the interpreter's lock.
`rollstream.producers.rewards.pool` starts it as `python -m rollstream.producers.rewards.process
SETTINGS [FUNCTION]`, with the task's settings as JSON.
"""

import math
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from numbers import Integral, Real
from queue import SimpleQueue
from traceback import extract_tb
from typing import Literal, cast

import msgspec

from rollstream.errors import ConfigurationError
from rollstream.producers.scoring.functions import (
    Finished,
    ScoringFunction,
    TrajectoryFacts,
    load_function,
)
from rollstream.producers.tasks.base import Environment, PlainTask, Reply, Score, Task
from rollstream.producers.tasks.registry import load_task

_REASON_MAX = 300  # characters of an exception's message that a record gets
_STATE_MAX = 1 << 16  # characters of an environment's state, which every partial carries
_REPLY_MAX = 1 << 16  # tokens of one reply; the engine's context is the real limit
_TOKENS = 1 << 32  # tokens are uint32 in records; the engine knows its vocabulary


class RewardQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Asks the task to judge the turns (`judge`), to reply to them as the environment (`reply`), or
    to call the scorer's function (`score`), which also gets `facts`.
    """

    kind: Literal["judge", "reply", "score"]
    reference: str
    state: str
    turns: list[list[int]]
    facts: TrajectoryFacts | None = None


class RewardAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Holds `reward` with `scores` (kind `score`), the environment's `tokens` and `state` (kind
    `reply`), or the `reason` why there is neither (kind `failed`).
    """

    kind: Literal["score", "reply", "failed"]
    reward: float = 0.0
    scores: dict[str, float] = {}  # msgspec copies empty defaults
    tokens: tuple[int, ...] = ()
    state: str = ""
    reason: str = ""


def failed_answer(reason: str) -> RewardAnswer:
    """Return an answer with the reason of a failure; invalid UTF-8 in it is replaced."""
    return RewardAnswer("failed", reason=reason[:_REASON_MAX].encode(errors="replace").decode())


def answer_question(
    task: Task, function: ScoringFunction | None, question: RewardQuestion
) -> RewardAnswer:
    """Run the task's code on a question. Any exception or result of the code becomes an answer."""
    try:
        if question.kind == "judge":
            return _judge_answer(task.judge(question.reference, question.turns))
        if question.kind == "reply":
            assert isinstance(task, Environment), f"task {task.name} has no reply()"
            return _reply_answer(task.reply(question.reference, question.state, question.turns))
        assert function is not None, "no function was given"
        assert question.facts is not None
        decode = task.tokenizer().decode
        return _function_answer(
            function(Finished(question.facts, question.reference, question.turns, decode))
        )
    except _UnusableResult as error:
        return failed_answer(str(error))
    except Exception as error:  # noqa: BLE001 (the task's code: any failure is an outcome)
        frame = extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        return failed_answer(f"{type(error).__name__} at {where}: {error}")


class _UnusableResult(ValueError):
    """The task's code returned a wrong type or value; the message names it."""


# The task's code may break its declared types, so the results below are typed as `object`.


def _judge_answer(score: object) -> RewardAnswer:
    if not isinstance(score, Score):
        raise _UnusableResult(f"judge() returned a {type(score).__name__}, not a Score")
    return RewardAnswer("score", _number(score.reward, "the reward"), _numbers(score.scores))


def _function_answer(result: object) -> RewardAnswer:
    """Accept a mapping of names to numbers, or a lone number, which gets the name ""."""
    if isinstance(result, Mapping):
        return RewardAnswer("score", scores=_numbers(cast("Mapping[object, object]", result)))
    return RewardAnswer("score", scores={"": _number(result, "the result")})


def _reply_answer(reply: object) -> RewardAnswer:
    if not isinstance(reply, Reply):
        raise _UnusableResult(f"reply() returned a {type(reply).__name__}, not a Reply")
    return RewardAnswer("reply", tokens=_tokens(reply.tokens), state=_state(reply.state))


def _state(state: object) -> str:
    if not isinstance(state, str):
        raise _UnusableResult(f"reply() gave a state that is a {type(state).__name__}, not text")
    if len(state) > _STATE_MAX:
        raise _UnusableResult(
            f"reply() gave a state of {len(state)} characters; at most {_STATE_MAX}"
        )
    state.encode()  # a lone surrogate raises here, where the error becomes an answer
    return state


def _tokens(tokens: object) -> tuple[int, ...]:
    """Return the tokens if they are whole numbers that fit a record's token type."""
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Iterable):
        raise _UnusableResult(
            f"reply() gave tokens that are a {type(tokens).__name__}, not a sequence"
        )
    found = list(islice(cast("Iterable[object]", tokens), _REPLY_MAX + 1))
    if len(found) > _REPLY_MAX:
        raise _UnusableResult(f"reply() gave more than {_REPLY_MAX} tokens")
    return tuple(_token(token) for token in found)


def _token(token: object) -> int:
    if isinstance(token, bool) or not isinstance(token, Integral):
        raise _UnusableResult(f"reply() gave the token {token!r}, not a whole number")
    number = int(token)
    if not 0 <= number < _TOKENS:
        raise _UnusableResult(f"reply() gave the token {number}, outside [0, 2**32)")
    return number


def _numbers(values: Mapping[object, object] | Mapping[str, float]) -> dict[str, float]:
    return {str(name): _number(value, str(name)) for name, value in values.items()}


def _number(value: object, name: str) -> float:
    if not isinstance(value, Real):
        raise _UnusableResult(f"{name} is a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise _UnusableResult(f"{name} is {number}")
    return number


def _read_questions(source: int) -> Iterator[RewardQuestion]:
    """Yield the questions that arrive on the pipe; the process exits at the pipe's end."""
    arrived: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        with open(source, "rb") as lines:
            for line in lines:
                arrived.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    decoder = msgspec.json.Decoder(RewardQuestion)
    while True:
        yield decoder.decode(arrived.get())


def _claim_pipes() -> tuple[int, int]:
    """Move both pipes to new descriptors and return these. Afterwards the task's prints go to
    stderr, and its stdin is empty.
    """
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return source, sink


def main(settings: str, function_path: str = "") -> None:
    """Build the task and write one first answer: `score` if it was built, or `failed` with the
    reason. Then answer questions until the pipe closes.
    """
    description = msgspec.json.decode(settings, type=PlainTask)
    source, sink = _claim_pipes()
    encode = msgspec.json.Encoder().encode
    with open(sink, "wb", buffering=0) as out:
        try:
            task = load_task(description)
            function = load_function(function_path) if function_path else None
        except ConfigurationError as error:
            out.write(encode(RewardAnswer("failed", reason=str(error))) + b"\n")
            return
        out.write(encode(RewardAnswer("score")) + b"\n")
        for question in _read_questions(source):
            # CPU seconds, twice the parent's limit: it takes effect only after the parent's death.
            signal.setitimer(signal.ITIMER_VIRTUAL, 2 * description.reward_timeout_s + 1)
            out.write(encode(answer_question(task, function, question)) + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
