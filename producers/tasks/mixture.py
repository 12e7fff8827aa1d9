"""Mixes the prompts of several tasks by exact weights, from a position alone. A prompt's reference
names its part, which judges the answer.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from inspect import isawaitable
from math import gcd, lcm
from threading import Event
from typing import cast

from rollstream.errors import ConfigurationError, TooFewHeldOut
from rollstream.producers.tasks.base import (
    Document,
    Environment,
    Prepared,
    ReadsRows,
    Reply,
    Score,
    Task,
    TaskPrompt,
    Teacher,
    Tokenizer,
    Turns,
    is_asynchronous,
    plain_documents,
)
from rollstream.storage.skipped_rows import SkippedRecord

CYCLE_MAX = 10_000  # most prompts after which the order of parts repeats
_PROBE = "".join(map(chr, range(32, 127)))  # equal tokenizers encode it equally


@dataclass(frozen=True, slots=True)
class PartPosition:
    """Locates a prompt: position `place` in the own order of part number `part`."""

    part: int
    place: int


class MixtureCycle:
    """The sequence of parts repeats after `len(cycle)` positions; the parts' own positions
    continue.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = _whole_weights(weights)
        self._order = _order(self._shares)

    def __len__(self) -> int:
        return len(self._order)

    def at(self, position: int) -> PartPosition:
        """Returns the part at this position, and the position in its own order, by `position` and
        the weights alone.
        """
        cycle, place = divmod(position, len(self._order))
        part, rank = self._order[place]
        return PartPosition(part, cycle * self._shares[part] + rank)


def _whole_weights(weights: Sequence[float]) -> list[int]:
    # Weights are read as exact decimals.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    shares = [int(weight * scale) for weight in exact]
    divisor = gcd(*shares)
    shares = [share // divisor for share in shares]
    if sum(shares) > CYCLE_MAX:
        raise ConfigurationError(
            f"task.parts: weights {', '.join(f'{w:g}' for w in weights)} repeat after "
            f"{sum(shares)} prompts, at most {CYCLE_MAX}; give rounder ones"
        )
    return shares


def _order(shares: Sequence[int]) -> list[tuple[int, int]]:
    # A smooth weighted round robin (nginx's load balancing): at each position every part gains its
    # share as credit, and the part with the most credit gives the prompt and pays the sum of all
    # shares. A cycle has exactly each part's share of prompts; any section deviates by about one.
    total = sum(shares)
    credit, counts = [0] * len(shares), [0] * len(shares)
    order: list[tuple[int, int]] = []
    for _ in range(total):
        credit = [credit_of + share for credit_of, share in zip(credit, shares, strict=True)]
        part = max(range(len(shares)), key=lambda number: (credit[number], -number))
        credit[part] -= total
        # The part, and the number of its earlier prompts in the cycle.
        order.append((part, counts[part]))
        counts[part] += 1
    return order


@dataclass(frozen=True, slots=True)
class MixturePart:
    """A task, its weight, and its label, which prompts and records carry."""

    label: str
    weight: float
    task: Task

    def holds_out(self) -> bool:
        try:
            self.task.held_out(1)
        except TooFewHeldOut as error:
            return error.available > 0
        except ConfigurationError:
            return True  # named where its prompts are asked for
        return True

    def labelled(self, prompt: TaskPrompt) -> TaskPrompt:
        reference = json.dumps({"part": self.label, "of": prompt.reference})
        stop = self.task.stop if prompt.stop is None else prompt.stop
        return replace(prompt, reference=reference, task=self.label, stop=tuple(stop))


def mix(parts: Sequence[MixturePart]) -> "TaskMixture":
    """Returns the mixture, an environment if any part is one. Raises `ConfigurationError` without a
    part, for equal labels or different tokenizers.
    """
    if not parts:
        raise ConfigurationError('task.name = "mixture" has no parts: add [[task.parts]] tables')
    labels = Counter(part.label for part in parts)
    repeated = [label for label, count in labels.items() if count > 1]
    if repeated:
        raise ConfigurationError(
            f"task.parts: {labels[repeated[0]]} parts are called {repeated[0]!r}; "
            "give each a label of its own"
        )
    for part in parts[1:]:
        _check_same_tokenizer(parts[0], part)
    if any(is_asynchronous(part.task) for part in parts):
        return AsyncEnvironmentMixture(parts)
    if any(isinstance(part.task, Environment) for part in parts):
        return EnvironmentMixture(parts)
    return TaskMixture(parts)


class TaskMixture:
    """A part judges its answers in any process: a prompt's reference has the part's label and own
    reference.
    """

    name = "mixture"

    def __init__(self, parts: Sequence[MixturePart]) -> None:
        self._parts = tuple(parts)
        self._tasks = {part.label: part.task for part in parts}
        self._cycle = MixtureCycle([part.weight for part in parts])

    @property
    def tasks(self) -> list[Task]:
        return [part.task for part in self._parts]

    @property
    def labels(self) -> list[str]:
        return [part.label for part in self._parts]

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(sorted({token for part in self._parts for token in part.task.stop}))

    def tokenizer(self) -> Tokenizer:
        return self._parts[0].task.tokenizer()

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        at = self._cycle.at(position)
        part = self._parts[at.part]
        return part.labelled(part.task.prompt(seed, at.place))

    def held_out(self, count: int) -> list[TaskPrompt]:
        """Returns prompts, mixed as the training prompts are. Raises `TooFewHeldOut` if a part has
        fewer than its share, or none holds out a prompt.
        """
        order = list(itertools.islice(self._held_out_order(), count))
        shares = Counter(at.part for at in order)
        lists = {number: self._held_out(number, n, count) for number, n in shares.items()}
        return [lists[at.part][at.place] for at in order]

    @cached_property
    def unevaluated(self) -> list[str]:
        return [part.label for part in self._parts if not part.holds_out()]

    def _held_out_order(self) -> Iterator[PartPosition]:
        silent = set(self.unevaluated)
        if len(silent) == len(self._parts):
            raise TooFewHeldOut("task.parts: no part holds out a prompt", 0)
        for place in itertools.count():
            at = self._cycle.at(place)
            if self._parts[at.part].label not in silent:
                yield at

    def documents(self, seed: int, count: int) -> list[Document]:
        """Returns as many of each part as in the first `count` positions. Raises
        `ConfigurationError` if a part makes none.
        """
        counts = Counter(self._cycle.at(place).part for place in range(count))
        documents: list[Document] = []
        for number, share in sorted(counts.items()):
            part = self._parts[number]
            if not isinstance(part.task, Teacher):
                raise ConfigurationError(
                    f"task.parts: {part.label} has no documents() to warm up on: set model.path "
                    "to a checkpoint to start from"
                )
            part_documents = plain_documents(part.task, seed, share)
            documents += [replace(each, style=each.style or part.label) for each in part_documents]
        return documents

    def judge(self, reference: str, turns: Turns) -> Score:
        part, inner_reference = self._part_of(reference)
        return part.judge(inner_reference, turns)

    def read_rows(self) -> None:
        for part in self._row_parts():
            part.read_rows()

    def count_long_rows(self, stop: Event) -> None:
        for part in self._row_parts():
            part.count_long_rows(stop)

    def skipped_rows(self) -> list[SkippedRecord]:
        return [record for part in self._row_parts() for record in part.skipped_rows()]

    def _row_parts(self) -> list[ReadsRows]:
        return [part.task for part in self._parts if isinstance(part.task, ReadsRows)]

    def _part_of(self, reference: str) -> tuple[Task, str]:
        packed = json.loads(reference)
        return self._tasks[packed["part"]], packed["of"]

    def _held_out(self, number: int, count: int, total: int) -> list[TaskPrompt]:
        part = self._parts[number]
        try:
            return [part.labelled(prompt) for prompt in part.task.held_out(count)]
        except TooFewHeldOut as error:
            first_missing = PartPosition(number, error.available)
            prompts_max = next(
                n for n, at in enumerate(self._held_out_order()) if at == first_missing
            )
            share = f"its share of {total} prompts"
            raise TooFewHeldOut(
                f"task.parts: {part.label}, {share}: {error}", prompts_max
            ) from error
        except ConfigurationError as error:
            raise ConfigurationError(f"task.parts: {part.label}: {error}") from error


class EnvironmentMixture(TaskMixture):
    """The reply of a part with a single turn is empty, which ends the dialogue."""

    def prepare(self) -> None:
        for part in self._parts:
            if isinstance(part.task, Prepared):
                part.task.prepare()

    def reply(self, reference: str, state: str, turns: Turns) -> Reply:
        part, inner_reference = self._part_of(reference)
        return (
            part.reply(inner_reference, state, turns)
            if isinstance(part, Environment)
            else Reply(())
        )


class AsyncEnvironmentMixture(TaskMixture):
    """The `reply` of some parts is an `async def`; a long one of another part delays all
    dialogues.
    """

    async def reply(self, reference: str, state: str, turns: Turns) -> Reply:
        part, inner_reference = self._part_of(reference)
        if not isinstance(part, Environment):
            return Reply(())
        reply: object = part.reply(inner_reference, state, turns)
        if isawaitable(reply):
            reply = await reply
        return cast("Reply", reply)


def part_reference(reference: str, label: str) -> str:
    """Returns the own reference of a prompt of the part `label`; any other reference as it is."""
    if not label:
        return reference
    try:
        packed: object = json.loads(reference)
    except (ValueError, RecursionError):
        return reference
    if not isinstance(packed, dict) or packed.keys() != {"part", "of"}:
        return reference
    fields = cast("dict[str, object]", packed)
    inner_reference = fields["of"]
    return (
        inner_reference
        if fields["part"] == label and isinstance(inner_reference, str)
        else reference
    )


def _check_same_tokenizer(first: MixturePart, other: MixturePart) -> None:
    first_tokenizer, other_tokenizer = first.task.tokenizer(), other.task.tokenizer()
    # As far as size, special tokens and the encoding of `_PROBE` show.
    if first_tokenizer is not other_tokenizer and _identity(first_tokenizer) != _identity(
        other_tokenizer
    ):
        raise ConfigurationError(
            f"task.parts: {first.label} and {other.label} have different tokenizers "
            f"({first_tokenizer.size} and {other_tokenizer.size} tokens), and a model has one; mix "
            "tasks of text with each other only"
        )


def _identity(tokenizer: Tokenizer) -> tuple[object, ...]:
    return tokenizer.size, dict(tokenizer.special), tuple(tokenizer.encode(_PROBE))
