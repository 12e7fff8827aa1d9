"""Tasks without a data set: `scripted`, a dialogue, and `numbered`, for runs without a model."""

import json
from functools import cached_property
from itertools import accumulate, product
from zlib import crc32

import numpy as np
import xxhash

from rollstream.errors import ConfigurationError, TooFewHeldOut
from rollstream.producers.tasks.base import Reply, Score, TaskPrompt, Turns, shuffled
from rollstream.producers.tasks.character_tokenizer import BOS, EOS, CharacterTokenizer
from rollstream.producers.tasks.remainder import CHARACTERS

Script = tuple[int, ...]
"""The digits that the environment of `scripted` names, one per turn."""

_TURNS_MAX = 5  # all 10 ** turns scripts are listed in memory
NUMBERED_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz ?"
_NUMBERS_MAX = 10**9


class Scripted:
    """The environment names `turns` digits one after the other, the first in the prompt (`4=`).
    After each the model shall answer with the sum of all so far, modulo 10, and `;`. The reward is
    the share of right sums.
    """

    name = "scripted"

    def __init__(self, turns: int = 3) -> None:
        if not 1 <= turns <= _TURNS_MAX:
            raise ConfigurationError(
                f"task.options of scripted: turns = {turns}; give 1 to {_TURNS_MAX}"
            )
        self._turns = turns
        self._tokenizer = CharacterTokenizer(CHARACTERS)
        self.stop = (EOS, *self._tokenizer.encode(";"))

    def tokenizer(self) -> CharacterTokenizer:
        return self._tokenizer

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        training = self._splits[1]
        epoch, index = shuffled(len(training), seed, position)
        return self._make_prompt(training[index], epoch)

    def held_out(self, count: int) -> list[TaskPrompt]:
        scripts = self._splits[0]
        if count > len(scripts):
            raise TooFewHeldOut(
                f"evaluation.prompts = {count}: scripted holds out {len(scripts)} of "
                f"{self._turns} turns",
                len(scripts),
            )
        return [self._make_prompt(script, 0) for script in scripts[:count]]

    def reply(self, reference: str, state: str, turns: Turns) -> Reply:
        """Returns the next digit, or no tokens once the script has ended or the model ended its
        turn with `<eos>`.
        """
        script = json.loads(reference)["script"]
        digit_count = int(state or 1)
        if digit_count == len(script) or turns[-1][-1] == EOS:
            return Reply(())
        return Reply(tuple(self._tokenizer.encode(f"{script[digit_count]}=")), str(digit_count + 1))

    def judge(self, reference: str, turns: Turns) -> Score:
        """Returns the share of right sums; a missing turn is wrong."""
        script = json.loads(reference)["script"]
        expected = [f"{total % 10};" for total in accumulate(script)]
        answers = [self._tokenizer.decode(turn) for turn in turns[::2]]
        right = sum(
            expected_text == other for expected_text, other in zip(expected, answers, strict=False)
        )
        return Score(right / len(expected), {"turns": float(len(answers))})

    @cached_property
    def _splits(self) -> tuple[list[Script], list[Script]]:
        splits: tuple[list[Script], list[Script]] = ([], [])
        for script in product(range(10), repeat=self._turns):
            # A checksum of the digits holds out about an eighth.
            splits[crc32(bytes(script)) % 8 > 0].append(script)
        return splits

    def _make_prompt(self, script: Script, epoch: int) -> TaskPrompt:
        tokens = (BOS, *self._tokenizer.encode(f"{script[0]}="))
        return TaskPrompt(tokens, json.dumps({"script": script}), epoch)


class Numbered:
    """Every pass repeats the `prompts` training prompts in a new order; numbers from `prompts` on
    are held out. A prompt is its number, `?`, and blanks up to `prompt_tokens` tokens.
    """

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
        """Returns 1 or 0, drawn from a hash of the answer and the prompt's number."""
        number = json.loads(reference)["number"]
        answer = np.array([token for turn in turns for token in turn], "<u4").tobytes()
        drawn = xxhash.xxh3_64_intdigest(answer, seed=number) / 2**64
        # Each prompt has its own probability of a 1, between .10 and .89, so that rewards differ
        # within a group; a model can learn nothing from them.
        chance = (xxhash.xxh3_64_intdigest(str(number).encode()) % 80 + 10) / 100
        return Score(float(drawn < chance))

    def _make_prompt(self, number: int, epoch: int) -> TaskPrompt:
        text = f"{number}?".ljust(self._prompt_tokens - 1)
        return TaskPrompt(
            (BOS, *self._tokenizer.encode(text)), json.dumps({"number": number}), epoch
        )
