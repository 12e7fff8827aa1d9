"""Scorers' requests by HTTP, as pure functions: a trajectory's texts and facts as JSON, or a
question to a judge model by OpenAI's protocol.
"""

import json
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from rollstream.foreign_json import parse_loose_json
from rollstream.producers.scoring.functions import Finished

JUDGED_MAX = 1 << 16  # characters of a judge's text that are searched
OTHERS_MAX = 8  # names of an answer, besides those that were asked for, that a reason lists
_PLACE = re.compile(r"\{(prompt|answer|reference)\}")


class UnreadableAnswer(ValueError):
    """An answer has no score; the message names the reason."""


class ScoreRequest(Protocol):
    """A single unnamed score has the name ""."""

    def body(self, finished: Finished) -> bytes: ...
    def scores(self, body: bytes) -> Mapping[str, float]:
        """Raises `UnreadableAnswer`."""
        ...

    def adapted(self, refusal: str) -> "ScoreRequest | None":
        """Returns the request without the parameter that the service refused with this message;
        None if nothing may be left out.
        """
        ...


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """The answer is a JSON number, or numbers by name; `true` and `false` are 1 and 0."""

    names: tuple[str, ...]

    def body(self, finished: Finished) -> bytes:
        facts = finished.facts
        return _encoded(
            {
                "trajectory": facts.trajectory,
                "group": facts.group,
                "index": facts.index,
                "task": facts.task,
                "finish": facts.finish,
                "prompt": finished.prompt,
                "answer": finished.answer,
                "reference": finished.reference,
                "reward": facts.reward,
                "scores": facts.scores,
                "names": self.names,
            }
        )

    def scores(self, body: bytes) -> Mapping[str, float]:
        value = _decoded(body)
        if isinstance(value, Mapping):
            table = cast(Mapping[str, object], value)
            scores = {name: _number(table[name]) for name in self.names if name in table}
            # Other names are not written; the reason of a missing name lists them.
            others = [name for name in table if name and name not in scores]
            return scores | dict.fromkeys(others[:OTHERS_MAX], math.nan)
        return {"": _number(value)}

    def adapted(self, refusal: str) -> ScoreRequest | None:
        return None


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """In the text `prompt`, `{prompt}`, `{answer}` and `{reference}` are replaced. The score is the
    last match of `pattern`'s group behind the judge's thought, divided by `score_max`; one outside
    of 0 to `score_max`, or of a cut answer, cannot be read.
    """

    model: str
    prompt: str
    pattern: str
    score_max: float
    tokens_max: int
    temperature: float | None
    tokens_name: str = "max_tokens"

    def body(self, finished: Finished) -> bytes:
        texts = {
            "prompt": finished.prompt,
            "answer": finished.answer,
            "reference": finished.reference,
        }
        # The judged answer may try to instruct the judge: it is inserted once, verbatim, and
        # placeholders in it stay text.
        content = _PLACE.sub(lambda match: texts[match.group(1)], self.prompt)
        fields: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            self.tokens_name: self.tokens_max,
        }
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        return _encoded(fields)

    def adapted(self, refusal: str) -> ScoreRequest | None:
        """Returns the request for OpenAI's newer models, which refuse `max_tokens`, and each
        temperature but their own.
        """
        if not _UNSUPPORTED.search(refusal):
            return None
        if self.tokens_name == "max_tokens" and "max_completion_tokens" in refusal:
            return replace(self, tokens_name="max_completion_tokens")
        if self.temperature is not None and "temperature" in refusal:
            return replace(self, temperature=None)
        return None

    def scores(self, body: bytes) -> Mapping[str, float]:
        text, is_cut = _judged_text(_decoded(body))
        if is_cut:
            raise UnreadableAnswer(
                f"the judge was cut after scoring.judge.tokens_max = {self.tokens_max} tokens"
            )
        text = text[-JUDGED_MAX:]
        # Marks of Markdown and full-width signs may stand in the score's place.
        matches = re.findall(self.pattern, text) or re.findall(self.pattern, _plain(text))
        if not matches:
            raise UnreadableAnswer(f"the judge gave no score: …{text[-80:]!r}")
        score = _number_of(matches[-1])
        if not 0 <= score <= self.score_max:
            raise UnreadableAnswer(f"the judge gave {score:g}, outside of 0 to {self.score_max:g}")
        return {"": score / self.score_max}


_UNSUPPORTED = re.compile("(?i)unsupported|not support")
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_MARKS = str.maketrans("", "", "*_`")


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).translate(_MARKS)


def _judged_text(value: object) -> tuple[str, bool]:
    try:
        choice = cast(Any, value)["choices"][0]
        text = choice["message"]["content"]
        is_cut = choice.get("finish_reason") == "length"
    except (AttributeError, KeyError, IndexError, TypeError):
        raise UnreadableAnswer("not an answer of OpenAI's protocol") from None
    if is_cut:
        return "", True
    if not isinstance(text, str):
        raise UnreadableAnswer("the judge gave no text")
    # A thought repeats the question's numbers; one without its end was cut.
    text = text.rpartition(_THOUGHT_END)[2]
    return text, text.lstrip().startswith(_THOUGHT)


def _number_of(text: object) -> float:
    try:
        return float(cast(str, text))
    except (TypeError, ValueError):
        raise UnreadableAnswer(f"{text!r} is no number") from None


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise UnreadableAnswer(f"a {type(value).__name__} in place of a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UnreadableAnswer("a number that is not finite")
    return number


def _encoded(value: object) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def _decoded(body: bytes) -> object:
    try:
        return parse_loose_json(body)
    except ValueError as error:
        raise UnreadableAnswer(f"not JSON: {error}"[:200]) from None
