"""The task contract: what is asked, in which order, and how an answer is judged.

A task is stateless: everything it gives is a pure function of its options and the arguments, so the
prompt source is no more than a position, and any process may build the same task from the same
options. Importing and judging stay light (no torch, no transformers): rewards run in processes of
their own that start in a fraction of a second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from streams.records import PROMPT, Sources, Tokens

STYLE_PREFIX = "style/"
"""Scores named `style/<name>` are 0 or 1; their means are the shares of an evaluation."""

Turns = Sequence[Sequence[int]]
"""What came after the prompt, cut where the source changes: generated, environment, generated, …"""


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """One question; `reference` is the task's own JSON, which `judge` gets back as it is.

    `task` is the label of the part of a mixture that asks, "" where there is one task; `stop` are
    the tokens that end a turn of its answer, None for those of the task.
    """

    tokens: tuple[int, ...]
    reference: str
    epoch: int = 0
    task: str = ""
    stop: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Judgement of one answer: the reward, and named scores that are recorded beside it."""

    reward: float
    scores: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Reply:
    """The environment's next turn and its state after it; no tokens means that the dialogue is
    over.
    """

    tokens: tuple[int, ...]
    state: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """One warm-up example; the loss covers `response` only. `style` names what it demonstrates."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    style: str = ""


class Tokenizer(Protocol):
    """Text to token numbers and back; `save` writes the files that transformers loads."""

    @property
    def size(self) -> int: ...
    @property
    def special(self) -> Mapping[str, int]:
        """Numbers of `pad_token_id`, `bos_token_id`, `eos_token_id`, as a model configuration names
        them.
        """
        ...

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def save(self, folder: Path) -> None: ...


class Task(Protocol):
    """What every task gives. `module:attribute` of a callable that returns one is a task too."""

    @property
    def name(self) -> str: ...
    @property
    def stop(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    def tokenizer(self) -> Tokenizer: ...

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        """The training prompt at `position` of the order of `seed`; any position may be asked
        first.
        """
        ...

    def held_out(self, count: int) -> list[TaskPrompt]:
        """The first `count` of a fixed list that no training order and no warm-up document
        contains.
        """
        ...

    def judge(self, reference: str, turns: Turns) -> Score:
        """The reward of a complete answer. May raise or hang: the reward pool survives it."""
        ...


@runtime_checkable
class Environment(Protocol):
    """A task of several turns answers each generated turn that ended in a stop token."""

    def reply(self, reference: str, state: str, turns: Turns) -> Reply:
        """What the environment says after the last of `turns`; `state` is that of its previous
        reply, "" at first.
        """
        ...


@runtime_checkable
class Teacher(Protocol):
    """A task that can make warm-up documents."""

    def documents(self, seed: int, count: int) -> list[Document]: ...


def turns_of(tokens: Tokens, sources: Sources) -> list[list[int]]:
    """Everything after the prompt as turns; `tokens` and `sources` are those of a trajectory."""
    first = int(np.count_nonzero(sources == PROMPT))
    answer, origin = tokens[first:], sources[first:]
    cuts = np.flatnonzero(np.diff(origin)) + 1
    return [turn.tolist() for turn in np.split(answer, cuts)]


def shuffled(count: int, seed: int, position: int) -> tuple[int, int]:
    """Epoch and index in `[0, count)` at `position` of an order that is a fresh permutation in each
    epoch.
    """
    epoch, place = divmod(position, count)
    return epoch, int(_permutation(count, seed, epoch)[place])


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count)
