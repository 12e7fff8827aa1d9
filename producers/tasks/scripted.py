"""Defines two small tasks that need no data set. `scripted` is a dialogue, in which an environment
replies from a script: it shows how a task of several turns is written, and tests use it. `numbered`
is for runs without a model (engine `paced`): prompts that differ by a number, and random rewards.

Both compute everything from their options and arguments, as `Task` demands.
"""

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
    """Implements the task `scripted`. The environment names `turns` digits one after the other, the
    first in the prompt (`4=`). After each digit the model shall answer with the sum of all digits
    so far, modulo 10, and `;`. The reward is the share of right sums.

    The environment keeps nothing in memory: the script is in the prompt's reference, and its state
    is the number of digits named so far. So a trajectory can resume in another process.
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
        """Returns the first prompts of the held-out scripts. Raises `TooFewHeldOut` if there
        are fewer.
        """
        scripts = self._splits[0]
        if count > len(scripts):
            raise TooFewHeldOut(
                f"evaluation.prompts = {count}: scripted holds out {len(scripts)} of "
                f"{self._turns} turns",
                len(scripts),
            )
        return [self._make_prompt(script, 0) for script in scripts[:count]]

    def reply(self, reference: str, state: str, turns: Turns) -> Reply:
        """Returns the next digit, or no tokens (the dialogue is over) once the script has ended or
        the model ended its turn with `<eos>`.
        """
        script = json.loads(reference)["script"]
        named = int(state or 1)
        if named == len(script) or turns[-1][-1] == EOS:
            return Reply(())
        return Reply(tuple(self._tokenizer.encode(f"{script[named]}=")), str(named + 1))

    def judge(self, reference: str, turns: Turns) -> Score:
        """Returns the share of right sums, each compared with the model's turn after its digit; a
        missing turn counts as wrong.
        """
        script = json.loads(reference)["script"]
        wanted = [f"{total % 10};" for total in accumulate(script)]
        given = [self._tokenizer.decode(turn) for turn in turns[::2]]
        right = sum(one == other for one, other in zip(wanted, given, strict=False))
        return Score(right / len(wanted), {"turns": float(len(given))})

    @cached_property
    def _splits(self) -> tuple[list[Script], list[Script]]:
        """The held-out scripts (about an eighth of all) and the training scripts, divided by a
        checksum of the digits.
        """
        splits: tuple[list[Script], list[Script]] = ([], [])
        for script in product(range(10), repeat=self._turns):
            splits[crc32(bytes(script)) % 8 > 0].append(script)
        return splits

    def _make_prompt(self, script: Script, epoch: int) -> TaskPrompt:
        tokens = (BOS, *self._tokenizer.encode(f"{script[0]}="))
        return TaskPrompt(tokens, json.dumps({"script": script}), epoch)


class Numbered:
    """Implements the task `numbered`, for the engine `paced`, which has no model: only the lengths
    of its answers matter. It has `prompts` training prompts; every pass repeats them in a new
    order. A prompt is its number, `?`, and blanks up to a length of `prompt_tokens` tokens. Numbers
    from `prompts` on are held out.
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
        """Returns the reward 1 or 0, drawn from a hash of the answer and the prompt's number. Each
        prompt has its own probability of a 1, between .10 and .89, so that rewards differ within a
        group; a model can learn nothing from them.
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
