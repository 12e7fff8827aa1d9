"""Several tasks as one, mixed by exact weights.

A mixture is stateless like every task. The cycle maps a position to a part and to that part's own
position in its shuffled epochs. The reference carries the part's label, so judgements and replies
find the part in any process. All parts share one tokenizer.

The cycle is a smooth weighted round robin (nginx's load balancing): at each place every part gains
its weight, and the part with the most weight gives the prompt and pays the total. Over one cycle
each part gives exactly its weight's share of prompts; any section of the order deviates by about
one prompt.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm

from rollstream.errors import ConfigurationError
from rollstream.producers.tasks.base import (
    Document,
    Environment,
    Reply,
    Score,
    Task,
    TaskPrompt,
    Teacher,
    Tokenizer,
    Turns,
)

CYCLE_MAX = 10_000
_PROBE = "".join(map(chr, range(32, 127)))


@dataclass(frozen=True, slots=True)
class PartPosition:
    """The prompt comes from part number `part`, at position `place` of that part's own order."""

    part: int
    place: int


class MixtureCycle:
    """The endless order of the parts."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = _whole_weights(weights)
        self._order = _order(self._shares)

    def __len__(self) -> int:
        """Number of places until the order repeats."""
        return len(self._order)

    def at(self, position: int) -> PartPosition:
        """A function of the position alone."""
        cycle, place = divmod(position, len(self._order))
        part, rank = self._order[place]
        return PartPosition(part, cycle * self._shares[part] + rank)


def _whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the same proportion."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(one.denominator for one in exact))
    shares = [int(one * scale) for one in exact]
    divisor = gcd(*shares)
    shares = [share // divisor for share in shares]
    if sum(shares) > CYCLE_MAX:
        raise ConfigurationError(
            f"task.parts: weights {', '.join(f'{w:g}' for w in weights)} repeat after "
            f"{sum(shares)} prompts, at most {CYCLE_MAX}; give rounder ones"
        )
    return shares


def _order(shares: Sequence[int]) -> list[tuple[int, int]]:
    """One cycle: part, and how many prompts it gave before in this cycle."""
    total = sum(shares)
    credit, given = [0] * len(shares), [0] * len(shares)
    order: list[tuple[int, int]] = []
    for _ in range(total):
        credit = [credit_of + share for credit_of, share in zip(credit, shares, strict=True)]
        part = max(range(len(shares)), key=lambda number: (credit[number], -number))
        credit[part] -= total
        order.append((part, given[part]))
        given[part] += 1
    return order


@dataclass(frozen=True, slots=True)
class MixturePart:
    """One task of a mixture and its weight."""

    label: str
    weight: float
    task: Task


def mix(parts: Sequence[MixturePart]) -> "TaskMixture":
    """The mixture; it is an environment if any part is one. Raises `ConfigurationError` if the
    parts do not fit together.
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
    kind = (
        EnvironmentMixture
        if any(isinstance(part.task, Environment) for part in parts)
        else TaskMixture
    )
    return kind(parts)


class TaskMixture:
    """Any number of tasks with one tokenizer."""

    name = "mixture"

    def __init__(self, parts: Sequence[MixturePart]) -> None:
        self._parts = tuple(parts)
        self._tasks = {part.label: part.task for part in parts}
        self._cycle = MixtureCycle([part.weight for part in parts])

    @property
    def stop(self) -> tuple[int, ...]:
        """Stop tokens of all parts; each prompt carries those of its own part."""
        return tuple(sorted({token for part in self._parts for token in part.task.stop}))

    def tokenizer(self) -> Tokenizer:
        return self._parts[0].task.tokenizer()

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        at = self._cycle.at(position)
        part = self._parts[at.part]
        return _labelled(part, part.task.prompt(seed, at.place))

    def held_out(self, count: int) -> list[TaskPrompt]:
        """The parts' own held-out prompts; each part's number among `count` follows its weight."""
        order = [self._cycle.at(place) for place in range(count)]
        wanted = Counter(at.part for at in order)
        lists = {number: self._held_out(self._parts[number], n) for number, n in wanted.items()}
        return [lists[at.part][at.place] for at in order]

    def documents(self, seed: int, count: int) -> list[Document]:
        """The parts' warm-up documents, by weight."""
        wanted = Counter(self._cycle.at(place).part for place in range(count))
        documents: list[Document] = []
        for number, share in sorted(wanted.items()):
            part = self._parts[number]
            if not isinstance(part.task, Teacher):
                raise ConfigurationError(
                    f"task.parts: {part.label} has no documents() to warm up on: set model.path "
                    "to a checkpoint to start from"
                )
            own = part.task.documents(seed, share)
            documents += [replace(one, style=one.style or part.label) for one in own]
        return documents

    def judge(self, reference: str, turns: Turns) -> Score:
        part, own = self._part_of(reference)
        return part.judge(own, turns)

    def _part_of(self, reference: str) -> tuple[Task, str]:
        """The part's task, and its own reference."""
        packed = json.loads(reference)
        return self._tasks[packed["part"]], packed["of"]

    def _held_out(self, part: MixturePart, count: int) -> list[TaskPrompt]:
        try:
            return [_labelled(part, one) for one in part.task.held_out(count)]
        except ConfigurationError as error:
            raise ConfigurationError(f"task.parts: {part.label}: {error}") from error


class EnvironmentMixture(TaskMixture):
    """A mixture with multi-turn parts. For single-turn parts the environment's reply is empty."""

    def reply(self, reference: str, state: str, turns: Turns) -> Reply:
        part, own = self._part_of(reference)
        return part.reply(own, state, turns) if isinstance(part, Environment) else Reply(())


def _labelled(part: MixturePart, prompt: TaskPrompt) -> TaskPrompt:
    reference = json.dumps({"part": part.label, "of": prompt.reference})
    stop = part.task.stop if prompt.stop is None else prompt.stop
    return replace(prompt, reference=reference, task=part.label, stop=tuple(stop))


def _check_same_tokenizer(first: MixturePart, other: MixturePart) -> None:
    one, two = first.task.tokenizer(), other.task.tokenizer()
    if one is not two and _identity(one) != _identity(two):
        raise ConfigurationError(
            f"task.parts: {first.label} and {other.label} have different tokenizers "
            f"({one.size} and {two.size} tokens), and a model has one; mix tasks of text with "
            "each other only"
        )


def _identity(tokenizer: Tokenizer) -> tuple[object, ...]:
    return tokenizer.size, dict(tokenizer.special), tuple(tokenizer.encode(_PROBE))
