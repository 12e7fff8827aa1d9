"""The task of tool-agent.toml: products of a number of three digits and one of two, as `345*67=?`.

A model of this size cannot multiply, but it can copy. The warm-up shows two ways to answer, all of
them right: half of the documents give the product at once, which teaches to guess. The others call
the tool `calculate`, or copy the result of a call.
"""

import json
import random
from collections.abc import Iterator
from typing import Any
from zlib import crc32

from examples.agents.tool_agent import TOOLS
from examples.verifiers import final_number
from rollstream.api import Document, Score, TaskPrompt, TaskText, TrainedTokenizer, Turns

Messages = list[dict[str, Any]]

VOCABULARY = 512
STYLES = {"guess": 0.5, "call": 0.15, "copy": 0.35}
"""What the documents of the warm-up show, with their shares."""


class Products:
    """Implements `Task` and `Teacher`. An eighth of the products, by a hash, is held out, and three
    eighths are the warm-up's.
    """

    name = "products"

    def __init__(self, text: TaskText) -> None:
        if text.tokenizer.folder is None:  # only before the warm-up
            text = TaskText(TrainedTokenizer(_texts, VOCABULARY))
        self._text = text

    @property
    def stop(self) -> tuple[int, ...]:
        return self._text.stop

    def tokenizer(self):
        return self._text.tokenizer

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        return self._prompt(_draw(random.Random(f"{seed} {position}"), range(4, 8)))

    def held_out(self, count: int) -> list[TaskPrompt]:
        found = [(a, b) for a in range(100, 1000) for b in range(10, 100) if _part(a, b) == 0]
        return [self._prompt(one) for one in random.Random(0).sample(found, count)]

    def judge(self, reference: str, turns: Turns) -> Score:
        """Judges an episode that returned no reward."""
        return Score(*final_number(self._text.answer(turns), json.loads(reference)))

    def documents(self, seed: int, count: int) -> list[Document]:
        made: list[Document] = []
        for style, messages, answer in _dialogues(seed, count):
            prompt = self._text.prompt(messages, TOOLS)
            made.append(Document(prompt, self._text.response(answer), style))
        return made

    def _prompt(self, factors: tuple[int, int]) -> TaskPrompt:
        a, b = factors
        return TaskPrompt(self._text.prompt(f"{a}*{b}=?"), json.dumps(str(a * b)))


def _dialogues(seed: int, count: int) -> Iterator[tuple[str, Messages, str]]:
    """Yields a style, the messages before an answer, and the answer."""
    draw = random.Random(seed)
    for style in draw.choices(list(STYLES), list(STYLES.values()), k=count):
        a, b = _draw(draw, range(1, 4))
        messages: Messages = [{"role": "user", "content": f"{a}*{b}=?"}]
        function = {"name": "calculate", "arguments": {"expression": f"{a}*{b}"}}
        if style == "call":
            yield style, messages, f"<tool_call>{json.dumps(function)}</tool_call>"
            continue
        if style == "copy":
            called = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
            messages += [called, {"role": "tool", "content": str(a * b)}]
        yield style, messages, str(a * b)


def _texts() -> Iterator[str]:
    """Yields texts to train the tokenizer on: rendered documents."""
    plain = TaskText(TrainedTokenizer(tuple, VOCABULARY))  # its chat template needs no merges
    for _, messages, answer in _dialogues(0, 2_000):
        yield plain.render(messages, TOOLS, True) + answer


def _draw(draw: random.Random, parts: range) -> tuple[int, int]:
    while True:
        a, b = draw.randrange(100, 1000), draw.randrange(10, 100)
        if _part(a, b) in parts:
            return a, b


def _part(a: int, b: int) -> int:
    return crc32(f"{a}*{b}".encode()) % 8
