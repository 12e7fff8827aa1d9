"""Runs a task's code, or a scorer's: `python -m rollstream.producers.rewards.process SETTINGS
[FUNCTION]` (JSON, an import path). Every result becomes a `RewardAnswer` of valid types, so none
can end the asking role.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from inspect import iscoroutine
from itertools import islice
from numbers import Integral, Real
from queue import SimpleQueue
from traceback import extract_tb
from typing import Literal, cast

import msgspec

from rollstream.errors import ConfigurationError, SandboxRefused
from rollstream.import_path import load_option
from rollstream.producers.rewards.facts import LOAD_SCORING, ScoringCall, TrajectoryFacts
from rollstream.producers.rewards.foreign_number import NoFiniteNumber, finite_number
from rollstream.producers.sandbox_settings import configure_sandboxes
from rollstream.producers.tasks.base import (
    Environment,
    PlainTask,
    Prepared,
    Reply,
    Score,
    Task,
    UnusableScore,
)
from rollstream.producers.tasks.registry import load_task
from rollstream.streams.foreign_text import reason_text

_REASON_MAX = 300  # most characters of the reason for a failure; the rest is cut off
_NAME_MAX = 1000  # of a score's name, far above what a trajectory may have
_STATE_MAX = 1 << 16  # most characters of an environment's state, which every partial carries
_REPLY_MAX = 1 << 16  # most tokens of one reply; the engine's context is the real limit
_TOKENS = 1 << 32  # tokens are uint32 in records; the engine checks its own vocabulary


class RewardQuestion(msgspec.Struct, frozen=True, array_like=True):
    """`judge` asks for the reward of a complete answer, `reply` for the environment's next turn
    after `state`, `score` for the scorer's numbers. `turns` are all tokens after the prompt, cut
    where the source changes.
    """

    kind: Literal["judge", "reply", "score"]
    reference: str
    state: str
    turns: list[list[int]]
    facts: TrajectoryFacts | None = None


class RewardAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`score` has a `reward` with named `scores`, `reply` the environment's `tokens` and new
    `state`, `failed` the `reason`, `refused` why no call of this task can succeed on this machine.
    """

    kind: Literal["score", "reply", "failed", "refused"]
    reward: float = 0.0
    scores: dict[str, float] = {}  # msgspec copies empty defaults
    tokens: tuple[int, ...] = ()
    state: str = ""
    reason: str = ""


def failed_answer(reason: str) -> RewardAnswer:
    """Returns an answer whose reason is cut at `_REASON_MAX` characters and encodable as UTF-8."""
    return RewardAnswer("failed", reason=reason_text(reason, _REASON_MAX))


def answer_question(
    task: Task, function: ScoringCall | None, question: RewardQuestion
) -> RewardAnswer:
    """Answers a question: any `Exception` and any unusable result becomes an answer of kind
    `failed`; a missing sandbox, one of kind `refused`.
    """
    try:
        if question.kind == "judge":
            return _judge_answer(task.judge(question.reference, question.turns))
        if question.kind == "reply":
            assert isinstance(task, Environment), f"task {task.name} has no reply()"
            return reply_answer(task.reply(question.reference, question.state, question.turns))
        assert function is not None, "no function was given"
        assert question.facts is not None
        decode = task.tokenizer().decode
        return _function_answer(
            function(question.facts, question.reference, question.turns, decode)
        )
    except SandboxRefused as error:
        return RewardAnswer("refused", reason=str(error))
    except Exception as error:  # noqa: BLE001 (the task's code: any failure is an outcome)
        return error_answer(error)


def error_answer(error: Exception) -> RewardAnswer:
    if isinstance(error, _UnusableResult | UnusableScore | NoFiniteNumber):
        return failed_answer(str(error))
    frame = extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return failed_answer(f"{type(error).__name__} at {where}: {reason_text(error, _REASON_MAX)}")


class _UnusableResult(ValueError):
    """Raised for a wrong type or value that the task's code returned; the message names it."""


# The task's code may break its declared types, so the results below are typed as `object`.


def _judge_answer(score: object) -> RewardAnswer:
    # A pair of a number and named scores, as a verifier's is.
    if isinstance(score, tuple):
        pair = cast("tuple[object, ...]", score)
        if len(pair) != 2 or not isinstance(pair[1], Mapping):
            raise _UnusableResult(f"judge() returned {pair!r}, not a Score or (reward, scores)")
        score = Score(cast(float, pair[0]), cast("Mapping[str, float]", pair[1]))
    if not isinstance(score, Score):
        if iscoroutine(score):
            score.close()
            raise _UnusableResult("judge() is an `async def`; it returns a Score")
        try:
            return RewardAnswer("score", finite_number(score, "the reward"))
        except NoFiniteNumber as error:
            if isinstance(score, Real | Decimal):
                raise
            kind = type(score).__name__
            raise _UnusableResult(f"judge() returned a {kind}, not a Score or a number") from error
    return RewardAnswer("score", finite_number(score.reward, "the reward"), _numbers(score.scores))


def _function_answer(result: object) -> RewardAnswer:
    if isinstance(result, Mapping):
        return RewardAnswer("score", scores=_numbers(cast("Mapping[object, object]", result)))
    return RewardAnswer("score", scores={"": finite_number(result, "the result")})


def reply_answer(reply: object) -> RewardAnswer:
    """Raises an error for `error_answer` if the reply is unusable."""
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
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Iterable):
        raise _UnusableResult(
            f"reply() gave tokens that are a {type(tokens).__name__}, not a sequence"
        )
    reply_tokens = list(islice(cast("Iterable[object]", tokens), _REPLY_MAX + 1))
    if len(reply_tokens) > _REPLY_MAX:
        raise _UnusableResult(f"reply() gave more than {_REPLY_MAX} tokens")
    return tuple(_token(token) for token in reply_tokens)


def _token(token: object) -> int:
    if isinstance(token, bool) or not isinstance(token, Integral):
        raise _UnusableResult(f"reply() gave the token {token!r}, not a whole number")
    number = int(token)
    if not 0 <= number < _TOKENS:
        raise _UnusableResult(f"reply() gave the token {number}, outside [0, 2**32)")
    return number


def _numbers(values: Mapping[object, object] | Mapping[str, float]) -> dict[str, float]:
    values_by_name = {reason_text(name, _NAME_MAX): value for name, value in values.items()}
    return {
        name: finite_number(value, f"the score {name!r}") for name, value in values_by_name.items()
    }


def _read_questions(source: int) -> Iterator[RewardQuestion]:
    arrived: SimpleQueue[bytes] = SimpleQueue()

    # When the parent ends for any reason, the pipe ends and this process exits: by a thread, so
    # even while a call hangs.
    def read() -> None:
        with open(source, "rb") as lines:
            for line in lines:
                arrived.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    decoder = msgspec.json.Decoder(RewardQuestion)
    while True:
        yield decoder.decode(arrived.get())


def claim_pipes() -> tuple[int, int]:
    """Returns new descriptors for questions and answers: prints of the task's code go to stderr,
    and its stdin is empty.
    """
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return source, sink


def alarm_s(limit_s: float) -> float:
    """Returns the CPU seconds after which a call is ended: its threads may compute on all cores."""
    return (2 * limit_s + 1) * (os.cpu_count() or 1)


def main(settings: str, function_path: str = "") -> None:
    """Writes a greeting, `score`, or `failed` with the reason, then answers until the pipe
    closes.
    """
    description = msgspec.json.decode(settings, type=PlainTask)
    configure_sandboxes(description.sandbox)
    source, sink = claim_pipes()
    encode = msgspec.json.Encoder().encode
    with open(sink, "wb", buffering=0) as out:
        try:
            task = load_task(description)
            if isinstance(task, Prepared):
                task.prepare()
            function = load_option(LOAD_SCORING)(function_path) if function_path else None
        except ConfigurationError as error:
            out.write(encode(RewardAnswer("failed", reason=str(error))) + b"\n")
            return
        out.write(encode(RewardAnswer("score")) + b"\n")
        for question in _read_questions(source):
            # The alarm ends this process after so many CPU seconds of all its threads in one call.
            # A living parent ends it earlier (after `reward_timeout_s`): the alarm is for a call
            # that outlives the parent and holds the interpreter's lock, so that the thread at the
            # pipe cannot run.
            is_reply = question.kind == "reply"
            limit_s = description.reply_timeout_s if is_reply else description.reward_timeout_s
            signal.setitimer(signal.ITIMER_VIRTUAL, alarm_s(limit_s))
            out.write(encode(answer_question(task, function, question)) + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
