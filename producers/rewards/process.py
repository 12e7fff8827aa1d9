"""The messages between a role and its reward processes, and the calls of the task's code that
answer them.

Whatever that code raises or returns becomes an `RewardAnswer` of valid types, one line on a pipe. No
result of a task, an environment or a scorer's function can end the role that asked.
"""

import math
import os
from collections.abc import Iterable, Mapping
from itertools import islice
from numbers import Integral, Real
from traceback import extract_tb
from typing import Literal, cast

import msgspec

from rollstream.producers.scoring.functions import TrajectoryFacts, Finished
from rollstream.producers.scoring.function import ScoringFunction
from rollstream.producers.tasks.base import Environment, Reply, Score, Task

_REASON_MAX = 300  # characters of an exception's message that a record gets
_STATE_MAX = 1 << 16  # characters of an environment's state, which every partial carries
_REPLY_MAX = 1 << 16  # tokens of one reply; the engine's context is the real limit
_TOKENS = 1 << 32  # tokens are uint32 in records; the engine knows its vocabulary


class RewardQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Judge the turns (`judge`), reply to them as the environment (`reply`), or call the scorer's
    function (`score`).
    """

    kind: Literal["judge", "reply", "score"]
    reference: str
    state: str
    turns: list[list[int]]
    facts: TrajectoryFacts | None = None


class RewardAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`reward` with `scores`, or the environment's `tokens` and `state`, or the reason why there is
    neither.
    """

    kind: Literal["score", "reply", "failed_answer"]
    reward: float = 0.0
    scores: dict[str, float] = {}  # msgspec copies empty defaults
    tokens: tuple[int, ...] = ()
    state: str = ""
    reason: str = ""


def failed_answer(reason: str) -> RewardAnswer:
    """An answer with the reason of a failure; invalid UTF-8 in it is replaced."""
    return RewardAnswer("failed", reason=reason[:_REASON_MAX].encode(errors="replace").decode())


def answer_question(task: Task, function: ScoringFunction | None, question: RewardQuestion) -> RewardAnswer:
    """Run the task's code on a question. Whatever it raises or returns becomes an answer."""
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
    """A result of the wrong type; the message names it."""


# The task's code may break its declared types, so the results below are typed as `object`.


def _judge_answer(score: object) -> RewardAnswer:
    if not isinstance(score, Score):
        raise _UnusableResult(f"judge() returned a {type(score).__name__}, not a Score")
    return RewardAnswer("score", _number(score.reward, "the reward"), _numbers(score.scores))


def _function_answer(result: object) -> RewardAnswer:
    """A mapping of names to numbers; a lone number gets the name ""."""
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
        raise _UnusableResult(f"reply() gave a state of {len(state)} characters; at most {_STATE_MAX}")
    state.encode()  # a lone surrogate raises here, where the error becomes an answer
    return state


def _tokens(tokens: object) -> tuple[int, ...]:
    """Whole numbers that fit a record's token type."""
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Iterable):
        raise _UnusableResult(f"reply() gave tokens that are a {type(tokens).__name__}, not a sequence")
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
