"""The task `automaton`, whose answers have a long tail: a log-normal number of steps of a counter
modulo 7, line by line (docs/explanation/scheduling.md).
"""

import json
import math
import re
from functools import cached_property
from statistics import NormalDist
from typing import Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rollstream.errors import ConfigurationError, TooFewHeldOut
from rollstream.producers.tasks.base import (
    STYLE_PREFIX,
    Document,
    Score,
    TaskPrompt,
    Turns,
    shuffled,
)
from rollstream.producers.tasks.character_tokenizer import BOS, EOS, CharacterTokenizer

Style = Literal["carried", "bare", "other"]
Question = tuple[int, int]
"""The number of steps, and the state before the first."""

STATES, STEPS_MIN, STEPS_MAX = 7, 3, 999
BY_ONE, BY_TWO, BARE = "abcdefg", "ABCDEFG", "-="
"""States in lines that advance by one step (as in prompts and answers) and by two, and those of
bare lines.
"""
SHORT_MAX = 24
"""Most steps of a short warm-up document, which is nearly all beginning and end."""
CHARACTERS = "0123456789" + BY_ONE + BY_TWO + BARE + "!"
"""The characters of prompts and answers, one token each."""

_P99_DEVIATIONS = 2.3263  # a normal variable's 99th percentile in standard deviations
_CARRIED = re.compile(r"(?:\d{3}[a-gA-G])+![a-gA-G]", re.ASCII)
_BARE = re.compile(r"(?:\d{3}[-=])+![a-gA-G]", re.ASCII)


def question_text(steps: int, state: int) -> str:
    """Returns `215c` for 512 steps from state 2: least significant digit first, which the model
    learns far better.
    """
    return _digits(steps) + BY_ONE[state]


def response_text(steps: int, state: int, pace: int = 1, carried: bool = True) -> str:
    """Returns after each `pace` steps a line of four characters, the steps left and the state, then
    `!` and the last state. For 3 steps from state 2 it is `200d100e000f!f`, by two steps
    `100E000F!F`, and bare `200-100-000-!f`.
    """
    states = BY_ONE if pace == 1 else BY_TWO
    steps_left, lines = steps, list[str]()
    while steps_left:
        steps_left = max(0, steps_left - pace)
        mark = states[(state + steps - steps_left) % STATES] if carried else BARE[pace - 1]
        lines.append(_digits(steps_left) + mark)
    return "".join(lines) + "!" + states[(state + steps) % STATES]


def style(response: str) -> Style:
    """Classifies by form, right or wrong: all lines have a state (`carried`), none has (`bare`), or
    `other`.
    """
    if _CARRIED.fullmatch(response):
        return "carried"
    return "bare" if _BARE.fullmatch(response) else "other"


def _digits(number: int) -> str:
    return f"{number:03d}"[::-1]


class Automaton:
    """Training repeats `prompts` questions, cut at `STEPS_MAX` steps. Of the warm-up documents the
    share `carried` carries the state, `by_two` takes two steps a line, `short` has at most
    `SHORT_MAX` steps, and `excerpts` are the first lines of a question of any number of steps.
    """

    name = "automaton"
    stop = (EOS,)

    def __init__(
        self,
        prompts: int = 96,
        median: float = 20.0,
        p99: float = 600.0,
        carried: float = 0.35,
        by_two: float = 0.5,
        excerpts: float = 0.35,
        short: float = 0.55,
    ) -> None:
        shares = {"carried": carried, "by_two": by_two, "excerpts": excerpts, "short": short}
        for option, share in shares.items():
            if not 0 <= share <= 1:
                raise _refusal(f"{option} = {share} is a share: give 0 to 1")
        if excerpts + short > 1:
            raise _refusal(f"excerpts = {excerpts} and short = {short}: together at most 1")
        if not 1 <= median < p99:
            raise _refusal(f"median = {median} and p99 = {p99}: give 1 ≤ median < p99")
        self._log_median = math.log(median)
        self._deviation = (math.log(p99) - self._log_median) / _P99_DEVIATIONS
        self._shares, self._prompts = shares, prompts
        prompts_max = len(self._splits["train"])
        if not 1 <= prompts <= prompts_max:
            raise _refusal(f"prompts = {prompts}: give 1 to {prompts_max}, as many as there are")
        self._tokenizer = CharacterTokenizer(CHARACTERS)

    def tokenizer(self) -> CharacterTokenizer:
        return self._tokenizer

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        """Returns a question of the position's epoch, which asks all training questions, the same
        for every seed, once in a new order by the seed.
        """
        epoch, index = shuffled(self._prompts, seed, position)
        return self._make_prompt(self._training_questions[index], epoch)

    def held_out(self, count: int) -> list[TaskPrompt]:
        available = len(self._splits["held_out"])
        if count > available:
            raise TooFewHeldOut(
                f"evaluation.prompts = {count}: automaton holds out {available}; ask for no more",
                available,
            )
        return [self._make_prompt(question, 0) for question in self._spread("held_out", count)]

    def documents(self, seed: int, count: int) -> list[Document]:
        """Returns `count` correct answers or excerpts, to prompts drawn from the warm-up split with
        repetition.
        """
        random = np.random.default_rng(seed)
        questions = self._splits["warm_up"]
        few = [index for index, (steps, _) in enumerate(questions) if steps <= SHORT_MAX]
        usual: list[int] = random.choice(len(questions), count, p=self._weights(questions)).tolist()
        # Excerpts teach large numbers without thousands of tokens.
        even: list[int] = random.integers(len(questions), size=count).tolist()
        short: list[int] = random.choice(few, count).tolist()
        lines, kind = random.integers(4, 17, size=count), random.random(count)
        carried = random.random(count) < self._shares["carried"]
        by_two = random.random(count) < self._shares["by_two"]
        documents: list[Document] = []
        for i in range(count):
            is_excerpt = kind[i] < self._shares["excerpts"]
            is_short = not is_excerpt and kind[i] < self._shares["excerpts"] + self._shares["short"]
            index = even[i] if is_excerpt else short[i] if is_short else usual[i]
            cut = int(lines[i]) if is_excerpt else None
            documents.append(
                self._document(questions[index], 1 + int(by_two[i]), bool(carried[i]), cut)
            )
        return documents

    def judge(self, reference: str, turns: Turns) -> Score:
        """Returns reward 1 if the answer ends with `!`, the right state (in either case) and the
        end token, else 0. The score `style/<name>` is 1 for the answer's style, `other` without its
        end token.
        """
        response = self._tokenizer.decode(turns[-1])
        ended = bool(turns[-1]) and turns[-1][-1] == EOS and EOS not in turns[-1][:-1]
        last = response.lower().rpartition("!")[1:]
        right = ended and last == ("!", json.loads(reference)["answer"])
        return Score(float(right), {STYLE_PREFIX + (style(response) if ended else "other"): 1.0})

    @cached_property
    def _training_questions(self) -> list[Question]:
        return self._spread("train", self._prompts)

    @cached_property
    def _splits(self) -> dict[str, list[Question]]:
        # The text's `crc32` modulo 8 decides: 0 and 1 are held out, 2 and 3 are warm-up, 4 to 7
        # training. So the splits share no prompt.
        names = (*["held_out"] * 2, *["warm_up"] * 2, *["train"] * 4)
        splits: dict[str, list[Question]] = {name: [] for name in names}
        for steps in range(STEPS_MIN, STEPS_MAX + 1):
            for state in range(STATES):
                place = crc32(question_text(steps, state).encode()) % 8
                splits[names[place]].append((steps, state))
        return splits

    def _spread(self, split: str, count: int) -> list[Question]:
        questions = self._splits[split]
        logs = np.log(np.array([steps for steps, _ in questions], np.float64))
        normal = NormalDist(self._log_median, self._deviation)
        chosen: list[Question] = []
        # Any beginning of the order is spread evenly over the quantiles of the distribution: the
        # nth question is the nearest unused one to the quantile of the nth van der Corput number.
        for number in range(1, count + 1):
            bits = f"{number:b}"
            quantile = int(bits[::-1], 2) / 2 ** len(bits)
            nearest = int(np.argmin(np.abs(logs - normal.inv_cdf(quantile))))
            chosen.append(questions[nearest])
            logs[nearest] = np.inf
        return chosen

    def _weights(self, questions: list[Question]) -> NDArray[np.float64]:
        steps = np.array([steps for steps, _ in questions], np.float64)
        off = (np.log(steps) - self._log_median) / self._deviation
        density = np.exp(-0.5 * off**2) / steps
        return density / density.sum()

    def _make_prompt(self, question: Question, epoch: int) -> TaskPrompt:
        steps, state = question
        tokens = (BOS, *self._tokenizer.encode(question_text(steps, state)))
        answer = BY_ONE[(state + steps) % STATES]
        return TaskPrompt(tokens, json.dumps({"answer": answer}), epoch)

    def _document(
        self, question: Question, pace: int, carried: bool, lines: int | None
    ) -> Document:
        text = response_text(*question, pace, carried)
        end = (EOS,)
        if lines is not None and 4 * lines < len(text) - 2:
            text, end = text[: 4 * lines], ()
        response = (*self._tokenizer.encode(text), *end)
        shape = "carried" if carried else "bare"
        return Document(self._make_prompt(question, 0).tokens, response, shape)


def _refusal(what: str) -> ConfigurationError:
    return ConfigurationError(f"task.options of automaton: {what}")
