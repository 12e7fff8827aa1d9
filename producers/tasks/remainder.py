"""The quickstart's task: x mod y, perhaps by a repeated subtraction
(docs/explanation/quickstart-task.md).
"""

import json
import re
from functools import cached_property
from typing import Literal
from zlib import crc32

import numpy as np

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

Style = Literal["direct", "jump", "full", "other"]
Question = tuple[int, int]

CHARACTERS = "0123456789%=>;"
"""One token each: 18 with the four special tokens. `;` ends a turn of the scripted task, which
shares the vocabulary.
"""

_FIXED_SEED = 0  # orders the lists that must be the same for every seed of a run
_RESPONSE = re.compile(r"((?:>\d{3})*)=(\d{3})", re.ASCII)


def question_text(x: int, y: int) -> str:
    """Returns `336%68` for 633 mod 86: a fixed width, least significant digit first, which the
    model learns far better.
    """
    return f"{x:03d}"[::-1] + "%" + f"{y:02d}"[::-1]


def number_text(value: int) -> str:
    """Returns the number as three digits, least significant first."""
    return f"{value:03d}"[::-1]


def working(x: int, y: int) -> list[int]:
    """Returns x - y, x - 2y and so on, the remainder last; never empty, because x ≥ 100 > y."""
    return list(range(x - y, -1, -y))


def response_text(x: int, y: int, lines: int) -> str:
    """Returns the first `lines` numbers, each after a `>`, then `=` and the answer. For 633 mod 86
    it is `=130` with no line and `>745>164=130` with two.
    """
    shown = "".join(">" + number_text(value) for value in working(x, y)[:lines])
    return f"{shown}={number_text(x % y)}"


def style(response: str) -> Style:
    """Classifies by form, right or wrong: `direct` shows no line, in `full` the answer equals the
    last line, in `jump` it does not.
    """
    match = _RESPONSE.fullmatch(response)
    if match is None:
        return "other"
    lines, answer = match.groups()
    if not lines:
        return "direct"
    return "full" if lines.endswith(answer) else "jump"


class Remainder:
    """Warm-up documents are correct: shares of `direct` and `jump`, the others `full`. Training
    repeats the first `prompts` prompts of a fixed order; 0: all.
    """

    name = "remainder"
    stop = (EOS,)

    def __init__(self, direct: float = 0.65, jump: float = 0.15, prompts: int = 0) -> None:
        if direct < 0 or jump < 0 or direct + jump > 1:
            raise ConfigurationError(
                f"task.options of remainder: direct = {direct} and jump = {jump} are shares of one "
                "whole: give both as 0 or more, together at most 1"
            )
        if prompts < 0:
            raise ConfigurationError(
                f"task.options of remainder: prompts = {prompts} must be ≥ 0 (0: all there are)"
            )
        self._shares, self._prompts = (direct, jump), prompts
        self._tokenizer = CharacterTokenizer(CHARACTERS)

    def tokenizer(self) -> CharacterTokenizer:
        return self._tokenizer

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        """Returns a question of the position's epoch, which asks all training questions once, in a
        new order by the seed.
        """
        questions = self._training_questions
        epoch, index = shuffled(len(questions), seed, position)
        return self._make_prompt(questions[index], epoch)

    def held_out(self, count: int) -> list[TaskPrompt]:
        questions = self._splits["held_out"]
        if count > len(questions):
            raise TooFewHeldOut(
                f"evaluation.prompts = {count}: remainder holds out {len(questions)}; "
                "ask for no more",
                len(questions),
            )
        order = [shuffled(len(questions), _FIXED_SEED, place)[1] for place in range(count)]
        return [self._make_prompt(questions[index], 0) for index in order]

    def documents(self, seed: int, count: int) -> list[Document]:
        """Returns correct answers in the styles' shares, to prompts drawn from the warm-up split
        with repetition.
        """
        questions = self._splits["warm_up"]
        random = np.random.default_rng(seed)
        chosen: list[int] = random.integers(len(questions), size=count).tolist()
        return [self._document(questions[index], random) for index in chosen]

    def judge(self, reference: str, turns: Turns) -> Score:
        """Returns reward 1 if the answer ends with `=`, the right three digits and the end token,
        else 0. The score `style/<name>` is 1 for the answer's style, `other` without its end token.
        """
        response = self._tokenizer.decode(turns[-1])
        ended = bool(turns[-1]) and turns[-1][-1] == EOS and EOS not in turns[-1][:-1]
        right = ended and response.rpartition("=")[1:] == ("=", json.loads(reference)["answer"])
        return Score(float(right), {STYLE_PREFIX + (style(response) if ended else "other"): 1.0})

    @cached_property
    def _training_questions(self) -> list[Question]:
        questions = self._splits["train"]
        if self._prompts > len(questions):
            raise ConfigurationError(
                f"task.options of remainder: prompts = {self._prompts}, but there are "
                f"{len(questions)} training prompts; ask for no more"
            )
        if not self._prompts:
            return questions
        # The same questions for every seed of the run.
        order = [shuffled(len(questions), _FIXED_SEED, place)[1] for place in range(self._prompts)]
        return [questions[index] for index in order]

    @cached_property
    def _splits(self) -> dict[str, list[Question]]:
        # The text's `crc32` modulo 8 decides: 0 is held out, 1 to 3 are warm-up, 4 to 7 training.
        # So the splits share no prompt.
        names = ("held_out", *["warm_up"] * 3, *["train"] * 4)
        splits: dict[str, list[Question]] = {name: [] for name in names}
        for x in range(100, 1000):
            for y in range(10, 100):
                splits[names[crc32(question_text(x, y).encode()) % 8]].append((x, y))
        return splits

    def _make_prompt(self, question: Question, epoch: int) -> TaskPrompt:
        x, y = question
        tokens = (BOS, *self._tokenizer.encode(question_text(x, y)))
        return TaskPrompt(tokens, json.dumps({"answer": number_text(x % y)}), epoch)

    def _document(self, question: Question, random: np.random.Generator) -> Document:
        x, y = question
        direct, jump = self._shares
        lines, draw = x // y, random.random()
        if draw < direct:
            shown, shape = 0, "direct"
        elif draw < direct + jump and lines > 1:  # a single line cannot be cut: full
            shown, shape = int(random.integers(1, lines)), "jump"
        else:
            shown, shape = lines, "full"
        response = (*self._tokenizer.encode(response_text(x, y, shown)), EOS)
        return Document(self._make_prompt(question, 0).tokens, response, shape)
