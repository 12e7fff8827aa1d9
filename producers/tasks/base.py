"""Defines the contract of a task (`Task`): its prompts, their order, and how an answer is judged. A
task may also be a dialogue (`Environment`) or make examples to train a first model (`Teacher`).

A task is stateless: all its results are pure functions of its options and the arguments. The prompt
source therefore only keeps a position, and any process can build the same task from the same
settings (`load_task` in registry.py). Import and judging stay light (no torch, no transformers),
because reward processes must start in a fraction of a second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import iscoroutinefunction
from pathlib import Path
from threading import Event
from typing import Any, Literal, Protocol, cast, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollstream.errors import ConfigurationError, TooFewHeldOut
from rollstream.storage.skipped_rows import SkippedRecord
from rollstream.streams.records import PROMPT
from rollstream.streams.values import Sources, Tokens

STYLE_PREFIX = "style/"
"""Scores named `style/<name>` are 0 or 1; an evaluation reports their means as shares."""

Turns = Sequence[Sequence[int]]
"""All tokens after the prompt, cut where the source changes: generated, environment,
generated, … Answers of an agent's episode to the same prompt are turns of their own.
"""
Option = int | float | bool | str | list[int | float | bool | str]
"""A value in the table `[task.options]` of the configuration, which the task is built from."""
TemplateValue = int | float | bool | str
"""A value of a variable of the chat template (`task.template_values`)."""


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """Holds one prompt. `reference` is the task's own JSON text, for instance with the expected
    answer; `judge` gets it back unchanged.

    `epoch` counts the complete passes over the data set before this prompt. In a mixture (several
    tasks, mixed by weight) `task` is the label of the task that the prompt is from, else "". `stop`
    are the tokens that end a turn of its answer; None: the task's own stop tokens.
    """

    tokens: tuple[int, ...]
    reference: str
    epoch: int = 0
    task: str = ""
    stop: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Holds the judgement of one answer: the reward, and named scores recorded beside it."""

    reward: float
    scores: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Reply:
    """Holds the `tokens` of the environment's next turn, and its `state` after it, which the next
    call of `reply` gets. Without tokens the dialogue is over.
    """

    tokens: tuple[int, ...]
    state: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """Holds one example for the warm-up, the supervised training of a first model before the run.
    The loss covers `response` only. `style` names the way of answering that it demonstrates.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    style: str = ""


class Tokenizer(Protocol):
    """Converts text to token numbers and back; `save` writes the files that transformers loads."""

    @property
    def size(self) -> int: ...
    @property
    def special(self) -> Mapping[str, int]:
        """The numbers of the special tokens, by their names in a model configuration:
        `pad_token_id`, `bos_token_id`, `eos_token_id`.
        """
        ...

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def save(self, folder: Path) -> None: ...


class Task(Protocol):
    """The interface of every task. The setting `task.name` names a registered task, or, by
    `module:attribute`, a callable that returns a task.
    """

    @property
    def name(self) -> str: ...
    @property
    def stop(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    def tokenizer(self) -> Tokenizer: ...

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        """Returns the training prompt at `position` in the endless order of prompts that `seed`
        determines. Positions may be requested in any order.
        """
        ...

    def held_out(self, count: int) -> list[TaskPrompt]:
        """Returns the first `count` prompts of a fixed list that shares no prompt with a training
        order or a warm-up document. Raises `TooFewHeldOut` if there are fewer.
        """
        ...

    def judge(self, reference: str, turns: Turns) -> Score:
        """Judge a complete answer to the prompt with this `reference`. This may raise or hang: it
        runs in a reward process, and the reward pool handles both.
        """
        ...


@runtime_checkable
class Environment(Protocol):
    """A task that is a dialogue of several turns: it replies to each generated turn that ended in a
    stop token. A task with the method `reply` is one. `reply` may be an `async def`: then one
    process waits for the replies of thousands of dialogues at once.

    A dialogue waits for its reply without a slot of the engine. A reply is asked for again after a
    failure (`task.retries`), and after the rollout's death, so it must depend on its arguments
    alone.
    """

    def reply(self, reference: str, state: str, turns: Turns) -> Reply:
        """Returns the environment's reply to the last of `turns`. `state` is the `Reply.state` of
        its previous reply in this dialogue, "" at first.
        """
        ...


@runtime_checkable
class ReadsRows(Protocol):
    """A task whose prompts are rows of files, some of which it may skip (`dataset.py`)."""

    def read_rows(self) -> None:
        """Read the files, unless they were read. Raises `ConfigurationError` if too many rows are
        bad.
        """
        ...

    def count_long_rows(self, stop: Event) -> None:
        """Count the tokens of all rows that may be too long, the longest first, until `stop` is
        set, so that too long ones are known before their turn. Raises `ConfigurationError` if too
        many are.
        """
        ...

    def skipped_rows(self) -> Sequence[SkippedRecord]:
        """Returns how many rows of each data set were read, and which are skipped as far as that is
        known; () before the files were read.
        """
        ...


def plain_documents(task: "Teacher", seed: int, count: int) -> list[Document]:
    """Returns documents of a task, which may be a user's: the tokens of each as tuples. Raises
    `ConfigurationError` for what is no document.
    """
    made: list[Document] = []
    for number, document in enumerate(task.documents(seed, count)):
        try:
            prompt, response = (
                tuple(int(token) for token in tokens)
                for tokens in (document.prompt, document.response)
            )
        except (AttributeError, TypeError, ValueError) as error:
            name = getattr(task, "name", type(task).__name__)
            raise ConfigurationError(
                f"task {name!r}: documents()[{number}] is no Document of token numbers: {error}"
            ) from error
        made.append(Document(prompt, response, document.style))
    return made


def _held_out(task: Task, asked: int) -> Sequence[TaskPrompt]:
    """Returns the held-out prompts of a task, which may be a user's and return anything."""
    prompts: Any = task.held_out(asked)
    if not isinstance(prompts, list | tuple):
        raise ConfigurationError(
            f"task {task.name!r}: held_out({asked}) returned a {type(prompts).__name__}, not a "
            "list of prompts"
        )
    return cast("Sequence[TaskPrompt]", prompts)


def held_out_count(task: Task, asked: int, is_set: bool) -> int:
    """Returns how many held-out prompts an evaluation asks: `asked`, or all that there are if these
    are fewer and nobody set the number (`is_set`). Raises `ConfigurationError` with both numbers if
    it was set.
    """
    while True:
        try:
            count = len(_held_out(task, asked))
        except TooFewHeldOut as error:
            if is_set:
                raise
            asked = min(error.available, asked - 1)
            continue
        if count < asked and is_set:
            raise ConfigurationError(
                f"evaluation.prompts: {asked} asked for, task {task.name!r} holds out {count}"
            )
        return min(count, asked)


def is_asynchronous(task: Task) -> bool:
    """Whether the task is an environment whose `reply` is an `async def`."""
    return iscoroutinefunction(getattr(task, "reply", None))


@runtime_checkable
class Prepared(Protocol):
    """A task whose calls need something that takes its time, such as a server that it starts. A
    reward process calls `prepare` before its first question, without the time limit of a call.
    """

    def prepare(self) -> None: ...


@runtime_checkable
class Teacher(Protocol):
    """A task that can make documents for the warm-up. A task with the method `documents` is one."""

    def documents(self, seed: int, count: int) -> list[Document]: ...


def turns_of(tokens: Tokens, sources: Sources, starts: Sequence[int] = ()) -> list[list[int]]:
    """Returns a trajectory's tokens after the prompt, cut into turns where the source changes, and
    at the indices `starts`, where branches begin: two answers to one prompt stand side by side, and
    are not one.
    """
    first = int(np.count_nonzero(sources == PROMPT))
    answer, origin = tokens[first:], sources[first:]
    cuts = {*(np.flatnonzero(np.diff(origin)) + 1).tolist(), *(start - first for start in starts)}
    inner = sorted(cut for cut in cuts if 0 < cut < len(answer))
    return [turn.tolist() for turn in np.split(answer, inner)]


def shuffled(count: int, seed: int, position: int) -> tuple[int, int]:
    """Returns the epoch, and the index in `[0, count)`, at `position` of an endless order that
    `seed` determines. Each epoch is a new permutation of all indices.
    """
    epoch, place = divmod(position, count)
    return epoch, int(_permutation(count, seed, epoch)[place])


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count)


class UnusableScore(TypeError):
    """Raised for what a user's verifier returned, if it is no score; the message names it."""


class PlainPart(msgspec.Struct, frozen=True):
    """Holds the settings of one part of a mixture (`PartSettings`) without validation."""

    name: str
    label: str
    weight: float
    options: dict[str, Option]


class PlainSandbox(msgspec.Struct, frozen=True):
    """Holds the settings of sandboxes (`SandboxSettings`) without validation."""

    backend: str
    time_s: float
    output_bytes: int
    memory_mib: int
    processes: int
    disk_mib: int
    image: str
    readable: tuple[str, ...]


class PlainTask(msgspec.Struct, frozen=True):
    """Holds the fields of `TaskSettings` that reward processes need, without validation. Reward
    processes decode the settings' JSON into this class, without pydantic: these processes start by
    the dozen, and importing pydantic takes as long as all their other imports.
    """

    name: str
    options: dict[str, Option]
    parts: tuple[PlainPart, ...]
    template: Literal["chat", "plain"]
    system: str
    template_values: dict[str, TemplateValue]
    template_date: str | None
    verifier_text: Literal["plain", "special", "opened"]
    tokenizer: str | None
    reward_timeout_s: float
    reply_timeout_s: float
    environment: tuple[str, ...]
    sandbox: PlainSandbox
