"""The contract of a task, which is stateless: its results are pure functions of options and
arguments, so any process can build it. Import and judging stay light (no torch, no transformers):
reward processes must start in a fraction of a second.
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
"""All tokens after the prompt, cut where the source changes: generated, environment, generated, …
Answers of an agent's episode to one prompt are turns of their own.
"""
Option = int | float | bool | str | list[int | float | bool | str]
"""A value in the table `[task.options]` of the configuration, which the task is built from."""
TemplateValue = int | float | bool | str
"""A value of a variable of the chat template (`task.template_values`)."""


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """`reference` is the task's own JSON text, which `judge` gets back. `stop` are the tokens that
    end a turn of its answer; None: the task's own.
    """

    tokens: tuple[int, ...]
    reference: str
    epoch: int = 0
    task: str = ""
    stop: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Score:
    reward: float
    scores: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Reply:
    """`tokens` of the next turn, and the `state` for the next call of `reply`. Without tokens the
    dialogue is over.
    """

    tokens: tuple[int, ...]
    state: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """One example for the warm-up. The loss covers `response` only; `style` names its way of
    answering.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    style: str = ""


class Tokenizer(Protocol):
    @property
    def size(self) -> int: ...
    @property
    def special(self) -> Mapping[str, int]:
        """The special tokens by their names in a model configuration: `pad_token_id`,
        `bos_token_id`, `eos_token_id`.
        """
        ...

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def save(self, folder: Path) -> None: ...


class Task(Protocol):
    """`task.name` names a registered task, or, by `module:attribute`, a callable that returns a
    task.
    """

    @property
    def name(self) -> str: ...
    @property
    def stop(self) -> tuple[int, ...]: ...

    def tokenizer(self) -> Tokenizer: ...

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        """Returns the training prompt at `position` in `seed`'s endless order, in which positions
        may be requested in any order.
        """
        ...

    def held_out(self, count: int) -> list[TaskPrompt]:
        """Returns the first `count` of a fixed list that shares no prompt with training or warm-up.
        Raises `TooFewHeldOut`.
        """
        ...

    def judge(self, reference: str, turns: Turns) -> Score:
        """Judges a complete answer; may raise or hang, in a reward process."""
        ...


@runtime_checkable
class Environment(Protocol):
    """A dialogue: `reply` follows each generated turn that ended in a stop token.

    A reply is asked for again after a failure (`task.retries`), and after the rollout's death, so
    it must depend on its arguments alone.
    """

    def reply(self, reference: str, state: str, turns: Turns) -> Reply:
        """Returns the reply to the last of `turns`; `state` is that of the previous reply, "" at
        first.
        """
        ...


@runtime_checkable
class ReadsRows(Protocol):
    def read_rows(self) -> None:
        """Reads the files, unless they were read. Raises `ConfigurationError` if too many rows are
        bad.
        """
        ...

    def count_long_rows(self, stop: Event) -> None:
        """Counts the tokens of rows that may be too long, the longest first, until `stop` is set.
        Raises `ConfigurationError` if too many are.
        """
        ...

    def skipped_rows(self) -> Sequence[SkippedRecord]:
        """Returns numbers of read and of skipped rows of each data set; () before the files were
        read.
        """
        ...


def plain_documents(task: "Teacher", seed: int, count: int) -> list[Document]:
    """Returns documents with tuples of tokens. Raises `ConfigurationError` for another value of a
    user's task.
    """
    documents: list[Document] = []
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
        documents.append(Document(prompt, response, document.style))
    return documents


def _held_out(task: Task, requested: int) -> Sequence[TaskPrompt]:
    # A user's task may return anything.
    prompts: Any = task.held_out(requested)
    if not isinstance(prompts, list | tuple):
        raise ConfigurationError(
            f"task {task.name!r}: held_out({requested}) returned a {type(prompts).__name__}, not a "
            "list of prompts"
        )
    return cast("Sequence[TaskPrompt]", prompts)


def held_out_count(task: Task, requested: int, is_set: bool) -> int:
    """Returns `requested`, or all if these are fewer and the number was not set (`is_set`). Raises
    `ConfigurationError` if it was.
    """
    while True:
        try:
            count = len(_held_out(task, requested))
        except TooFewHeldOut as error:
            if is_set:
                raise
            requested = min(error.available, requested - 1)
            continue
        if count < requested and is_set:
            raise ConfigurationError(
                f"evaluation.prompts: {requested} asked for, task {task.name!r} holds out {count}"
            )
        return min(count, requested)


def is_asynchronous(task: Task) -> bool:
    return iscoroutinefunction(getattr(task, "reply", None))


@runtime_checkable
class Prepared(Protocol):
    """A reward process calls `prepare` before its first question, without the time limit of a
    call.
    """

    def prepare(self) -> None: ...


@runtime_checkable
class Teacher(Protocol):
    """Makes documents for the warm-up."""

    def documents(self, seed: int, count: int) -> list[Document]: ...


def turns_of(tokens: Tokens, sources: Sources, starts: Sequence[int] = ()) -> list[list[int]]:
    """Returns the tokens behind the prompt, cut where the source changes, and at the indices
    `starts`, where branches begin.
    """
    first = int(np.count_nonzero(sources == PROMPT))
    answer, origin = tokens[first:], sources[first:]
    # Two answers to one prompt stand side by side, and are not one turn.
    cuts = {*(np.flatnonzero(np.diff(origin)) + 1).tolist(), *(start - first for start in starts)}
    inner = sorted(cut for cut in cuts if 0 < cut < len(answer))
    return [turn.tolist() for turn in np.split(answer, inner)]


def shuffled(count: int, seed: int, position: int) -> tuple[int, int]:
    """Returns the epoch, and the index in `[0, count)`, at `position` of `seed`'s order: each epoch
    is a new permutation.
    """
    epoch, place = divmod(position, count)
    return epoch, int(_permutation(count, seed, epoch)[place])


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count)


class UnusableScore(TypeError):
    """Raised for what a user's verifier returned, if it is no score; the message names it."""


class PlainPart(msgspec.Struct, frozen=True):
    name: str
    label: str
    weight: float
    options: dict[str, Option]


class PlainSandbox(msgspec.Struct, frozen=True):
    backend: str
    time_s: float
    output_bytes: int
    memory_mib: int
    processes: int
    disk_mib: int
    image: str
    readable: tuple[str, ...]


class PlainTask(msgspec.Struct, frozen=True):
    """`TaskSettings` without validation: reward processes start by the dozen, and importing
    pydantic takes as long as all their other imports.
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
