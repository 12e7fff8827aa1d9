"""Prompts that differ by a number only, for runs with the engine `paced`, where only the lengths of
the answers matter.

There are `prompts` of them, repeated in every pass in a new order. The reward is drawn from a hash
of the answer, with a different probability for each prompt, so that rewards differ within a group;
a model can learn nothing from it.
"""

import json

import numpy as np
import xxhash

from rollstream.producers.tasks.base import Score, TaskPrompt, Turns, shuffled
from rollstream.producers.tasks.character_tokenizer import BOS, EOS, CharacterTokenizer
from rollstream.errors import ConfigurationError

NUMBERED_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz ?"
_NUMBERS_MAX = 10**9


class Numbered:
    """The task. A prompt is its number, `?`, and blanks up to `prompt_tokens`."""

    name = "numbered"
    stop = (EOS,)

    def __init__(self, prompts: int = 192, prompt_tokens: int = 64) -> None:
        if not 1 <= prompts <= _NUMBERS_MAX:
            raise ConfigurationError(
                f"task.options of numbered: prompts = {prompts}; give 1 to {_NUMBERS_MAX}"
            )
        if prompt_tokens < 1:
            raise ConfigurationError(
                f"task.options of numbered: prompt_tokens = {prompt_tokens}; give 1 or more"
            )
        self._prompts, self._prompt_tokens = prompts, prompt_tokens
        self._tokenizer = CharacterTokenizer(NUMBERED_CHARACTERS)

    def tokenizer(self) -> CharacterTokenizer:
        return self._tokenizer

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        epoch, number = shuffled(self._prompts, seed, position)
        return self._make_prompt(number, epoch)

    def held_out(self, count: int) -> list[TaskPrompt]:
        return [self._make_prompt(self._prompts + number, 0) for number in range(count)]

    def judge(self, reference: str, turns: Turns) -> Score:
        """1 or 0, a function of the answer."""
        number = json.loads(reference)["number"]
        answer = np.array([token for turn in turns for token in turn], "<u4").tobytes()
        drawn = xxhash.xxh3_64_intdigest(answer, seed=number) / 2**64
        chance = (xxhash.xxh3_64_intdigest(str(number).encode()) % 80 + 10) / 100
        return Score(float(drawn < chance))

    def _make_prompt(self, number: int, epoch: int) -> TaskPrompt:
        text = f"{number}?".ljust(self._prompt_tokens - 1)
        return TaskPrompt(
            (BOS, *self._tokenizer.encode(text)), json.dumps({"number": number}), epoch
        )
