"""The lengths of answers, drawn (`Workload`) or recorded (`RecordedWorkload`).

Drawn lengths are a function of (seed, pass over the prompts, prompt) alone, so all policies get the
same work. Answers to one prompt correlate (a Gaussian copula): a length is the quantile of a normal
deviate, the sum of one part per prompt, equal in all passes, and one per answer.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.paced.lengths import (
    NORMAL,
    LengthDistribution,
    LengthTrace,
    read_trace,
)

EDGE, KNOTS = 6.0, 2_401
"""Quantiles are tabulated at `KNOTS` normal deviates from -`EDGE` to `EDGE`; beyond each end is one
answer in 10⁹.
"""
DEVIATES = np.linspace(-EDGE, EDGE, KNOTS)
TOPIC = {"trajectories", "topic=trajectories"}  # names of the folder of an archive's trajectories


@dataclass(frozen=True, slots=True)
class AnswerLengths:
    """Quantiles of `distribution`, cut at `longest`, by normal deviates. `correlation` is the share
    of a deviate's variance that all answers to one prompt have in common.
    """

    distribution: LengthDistribution
    correlation: float
    longest: int
    table: NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shares = (NORMAL.cdf(float(at)) for at in DEVIATES)
        table = np.array([self.distribution.quantile(min(max(s, 1e-9), 1 - 1e-9)) for s in shares])
        object.__setattr__(self, "table", table)

    def from_deviates(self, deviates: NDArray[np.float64]) -> NDArray[np.int64]:
        """Returns lengths in whole tokens from 1 to `longest`."""
        drawn = np.interp(deviates, DEVIATES, self.table)
        return np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)


Turns = tuple[tuple[int, float], ...]
"""Of each turn but the last: the answer tokens at its end, and the seconds that the environment
takes until the next one.
"""


@dataclass(frozen=True, slots=True)
class EnvironmentWaits:
    """Between the turns of an answer the environment (a tool, a sandbox) works: their number is
    geometric with this mean, their ends are uniform over the answer. With `holds_kv` a waiting
    trajectory's tokens stay in the cache.
    """

    turns_mean: float
    seconds: LengthDistribution
    holds_kv: bool = True

    def draw(self, lengths: list[int], random: np.random.Generator) -> list[Turns]:
        return [self._turns(length, random) for length in lengths]

    def _turns(self, length: int, random: np.random.Generator) -> Turns:
        waits = int(random.geometric(1 / self.turns_mean)) - 1
        ends = sorted({int(at) for at in random.integers(1, max(2, length), waits)} - {length})
        shares = random.uniform(1e-9, 1 - 1e-9, len(ends))
        return tuple(
            (at, self.seconds.quantile(float(share)))
            for at, share in zip(ends, shares, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups by their numbers in the order of admission: `prompts` prompts of `prompt_tokens`
    tokens, repeated pass after pass, with `samples` answers each.
    """

    lengths: AnswerLengths
    samples: int
    prompts: int
    prompt_tokens: int
    seed: int
    environment: EnvironmentWaits | None = field(default=None, kw_only=True)

    def group(self, number: int) -> list[int]:
        return self._drawn(number // self.prompts, number % self.prompts)

    def turns(self, number: int, lengths: list[int]) -> list[Turns]:
        if self.environment is None:
            return [()] * len(lengths)
        return self.environment.draw(lengths, np.random.default_rng([self.seed, 4, number]))

    def prompt_of(self, number: int) -> int:
        return number % self.prompts

    def history(self, prompt: int) -> list[int]:
        """Returns lengths of the prompt's answers in a pass before the first one."""
        return self._drawn(-1, prompt)

    def _drawn(self, pass_: int, prompt: int) -> list[int]:
        shared = np.random.default_rng([self.seed, 1, prompt]).standard_normal()
        answer_parts = np.random.default_rng([self.seed, 2, pass_ + 1, prompt]).standard_normal(
            self.samples
        )
        part = self.lengths.correlation
        return self.lengths.from_deviates(
            np.sqrt(part) * shared + np.sqrt(1 - part) * answer_parts
        ).tolist()


@dataclass(frozen=True, slots=True)
class RecordedWorkload(Workload):
    """Group by group; missing answers are drawn. There is no history at the start."""

    groups: tuple[tuple[int, ...], ...] = ()

    def group(self, number: int) -> list[int]:
        recorded = self.groups[number] if number < len(self.groups) else ()
        drawn = Workload.group(self, number)
        return [*recorded, *drawn[len(recorded) :]]

    def history(self, prompt: int) -> list[int]:
        return []


def read_lengths(path: str, column: str) -> LengthTrace:
    """Reads the lengths in ascending order, those below 1 skipped: from a text file with one a
    line, a Parquet file, or a folder of these such as an archive, where `column` holds lengths, or
    lists whose sizes are the lengths. Raises `ConfigurationError`.
    """
    where = Path(path)
    if where.is_dir() or where.suffix == ".parquet":
        return _of_parquet(where, column)
    try:
        return read_trace(path)
    except ConfigurationError as error:  # the message names the paced engine's setting
        raise ConfigurationError(str(error).replace("paced.lengths", "lengths")) from None


def _of_parquet(where: Path, column: str) -> LengthTrace:
    files = sorted(where.rglob("*.parquet")) if where.is_dir() else [where]
    # A folder that is no archive has none: all its files are read.
    topic_files = [file for file in files if TOPIC & set(file.parts)]
    lengths = sorted(n for file in topic_files or files for n in _read(file, column) if n >= 1)
    if not lengths:
        raise ConfigurationError(f"lengths.trace: no lengths in column {column} of {where}")
    return LengthTrace(tuple(lengths))


def _read(file: Path, column: str) -> list[float]:
    import pyarrow as pa
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    try:
        values = parquet.ParquetFile(file).read(columns=[column]).column(column)
    except (OSError, KeyError, pa.ArrowInvalid) as error:
        raise ConfigurationError(
            f"lengths.trace: no column {column} can be read from {file}: {error}"
        ) from None
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        values = compute.list_value_length(values)
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        raise ConfigurationError(
            f"lengths.trace: column {column} of {file} is {values.type}, neither number nor list"
        )
    return [float(value) for value in values.drop_null().to_pylist()]


@dataclass(slots=True, eq=False)
class SimulatedTrajectory:
    """`prompt` tokens, the final `length` of the answer, which no planner sees, `done` tokens so
    far, the forecast `predicted`. `spans` are (version, tokens generated under it) in order
    (invariant 3).
    """

    name: str
    group: int
    wave: int
    prompt: int
    length: int
    predicted: float = 0.0
    done: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    span_tokens: int = 0
    step_offset: int = 0
    """While it runs, the answer has (decode steps of its replica - `step_offset`) tokens; `done`
    follows when the trajectory stops or the weights change.
    """
    attempt: int = 1
    moves: int = 0
    version: int = -1
    """Under `keep_version` the one under which it started; -1 before."""
    turns: Turns = ()
    turn: int = 0
    ready_s: float = 0.0
    is_known: bool = False
    """Earlier answers to the prompt are known, from which drafts are made."""
    is_held: bool = False
    """In the cache although it does not run."""
    cached_under: int = -1

    def has_turn(self) -> bool:
        return self.turn < len(self.turns)

    def stops_at(self) -> int:
        """Returns answer tokens at which it next waits or ends."""
        return self.turns[self.turn][0] if self.has_turn() else self.length

    def next_wait_s(self) -> float:
        """Returns how long the wait lasts."""
        self.turn += 1
        return self.turns[self.turn - 1][1]

    def close_span(self, version: int) -> None:
        """Adds the tokens since the last span."""
        if self.done > self.span_tokens:
            if self.spans and self.spans[-1][0] == version:
                before = self.spans.pop()[1]
                self.spans.append((version, before + self.done - self.span_tokens))
            else:
                self.spans.append((version, self.done - self.span_tokens))
            self.span_tokens = self.done

    def remove_newest(self, tokens: int) -> None:
        """Tokens that no partial holds."""
        self.done -= tokens
        self.turn = min(self.turn, sum(at <= self.done for at, _ in self.turns))
        self.span_tokens = min(self.span_tokens, self.done)
        over = sum(count for _, count in self.spans) - self.span_tokens
        while over > 0:
            version, count = self.spans.pop()
            if count > over:
                self.spans.append((version, count - over))
            over -= count

    def restart(self) -> None:
        self.done = self.span_tokens = self.turn = 0
        self.ready_s = 0.0
        self.spans.clear()
        self.version = -1
