"""Defines two small tasks without data: `scripted`, whose environment replies from a script, and
`numbered`, whose prompts differ by a number only.
"""

import json
from functools import cached_property
from itertools import accumulate, product
from zlib import crc32

import numpy as np
import xxhash

from rollstream.errors import ConfigurationError
from rollstream.producers.tasks.base import Reply, Score, TaskPrompt, Turns, shuffled
from rollstream.producers.tasks.character_tokenizer import BOS, EOS, CharacterTokenizer
from rollstream.producers.tasks.remainder import CHARACTERS

Script = tuple[int, ...]

_TURNS_MAX = 5  # all 10 ** turns scripts are listed in memory
NUMBERED_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz ?"
_NUMBERS_MAX = 10**9


class Scripted:
    """Implements the task `scripted`. The environment names `turns` digits, the first one in the
    prompt (`4=`); after each the model answers with the running total modulo 10 and `;`. The reward
    is the share of right totals.

    The reference is the script, and the state is the number of digits named so far, so a trajectory
    can resume in another process.
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
            raise ConfigurationError(
                f"evaluation.prompts = {count}: scripted holds out {len(scripts)} of "
                f"{self._turns} turns"
            )
        return [self._make_prompt(script, 0) for script in scripts[:count]]

    def reply(self, reference: str, state: str, turns: Turns) -> Reply:
        """Return the next digit, until the script ends or the model ends with `<eos>`."""
        script = json.loads(reference)["script"]
        named = int(state or 1)
        if named == len(script) or turns[-1][-1] == EOS:
            return Reply(())
        return Reply(tuple(self._tokenizer.encode(f"{script[named]}=")), str(named + 1))

    def judge(self, reference: str, turns: Turns) -> Score:
        """Return the share of the script's running totals that are right, each in its own turn."""
        script = json.loads(reference)["script"]
        wanted = [f"{total % 10};" for total in accumulate(script)]
        given = [self._tokenizer.decode(turn) for turn in turns[::2]]
        right = sum(one == other for one, other in zip(wanted, given, strict=False))
        return Score(right / len(wanted), {"turns": float(len(given))})

    @cached_property
    def _splits(self) -> tuple[list[Script], list[Script]]:
        """Held-out and training scripts, by the checksum of the digits."""
        splits: tuple[list[Script], list[Script]] = ([], [])
        for script in product(range(10), repeat=self._turns):
            splits[crc32(bytes(script)) % 8 > 0].append(script)
        return splits

    def _make_prompt(self, script: Script, epoch: int) -> TaskPrompt:
        tokens = (BOS, *self._tokenizer.encode(f"{script[0]}="))
        return TaskPrompt(tokens, json.dumps({"script": script}), epoch)


class Numbered:
    """Implements the task `numbered`, for the engine `paced`, where only the lengths of the answers
    matter. It has `prompts` prompts, repeated in every pass in a new order. A prompt is its number,
    `?`, and blanks up to `prompt_tokens`.
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
        """Return 1 or 0, a function of the prompt's number and the answer. It is drawn from a hash
        of the answer, with a different probability for each prompt, so that rewards differ within a
        group; a model can learn nothing from it.
        """
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
