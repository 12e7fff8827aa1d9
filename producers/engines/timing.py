"""Measures an engine's step times over batch sizes and KV lengths, and fits a roofline to them.

The roofline is fitted both ways, reading beside arithmetic and one after the other, by least
squares of relative errors; the better fit stands. Which part of a step counts is found by turns:
guess, fit, look again.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from producers.engines.base import Engine, Request
from producers.engines.paced.roofline import Roofline, batch_max
from producers.engines.profiles import Profile
from streams.records import PROMPT, Sampling

STEPS = 16  # of each point; the first one prefills, and the next two are not counted
SKIPPED = 2
FASTEST = 0.25  # of the steps of a point are at most as long as what stands for all
CONTEXT_MIN = 4 * STEPS  # shorter ones would end while they are timed
KV_SHARES = (0.05, 0.25, 0.5, 0.85)  # of the context
TURNS_MAX = 30

Row = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """A decode step of `rows` sequences with `kv_tokens` cached together took `seconds`; filling
    the cache of one of them, of `prefilled` tokens, took `prefill_s`.
    """

    rows: int
    kv_tokens: float
    seconds: float
    prefilled: int
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Timing:
    """An empty engine, and what it holds."""

    engine: Engine
    slots: int
    context_max: int
    vocabulary: int
    clock: Callable[[], float] = time.perf_counter


def points_of(timing: Timing) -> Iterator[Point]:
    """Every batch size at every KV length, the small ones first."""
    rows = _doubling(timing.slots)
    room = timing.context_max - STEPS - 1
    for length in sorted(
        {min(room, max(2, int(share * timing.context_max))) for share in KV_SHARES}
    ):
        for count in rows:
            yield _measure(timing, count, length)


def fitted(
    engine: str, model: str, slots: int, context_max: int, points: Sequence[Point]
) -> Profile:
    """The better of both fits."""
    found = [fit(points, overlapping) for overlapping in (True, False)]
    roofline = min(found, key=lambda one: float(np.median(errors(one, points))))
    wrong = errors(roofline, points)
    return Profile(
        engine=engine,
        model=model,
        device="",
        slots=slots,
        context_max=context_max,
        roofline=roofline,
        batch_max=batch_max(roofline, slots),
        error=float(np.median(wrong)),
        error_max=float(wrong.max()),
        points=len(points),
    )


def fit(points: Sequence[Point], overlapping: bool) -> Roofline:
    """The roofline of this kind that is nearest to the points, relative errors squared."""
    rows = np.array([p.rows for p in points], np.float64)
    kv = np.array([p.kv_tokens for p in points], np.float64)
    seconds = np.array([p.seconds for p in points])
    # A prompt is computed once for all its rows, so one row says most about it.
    prefill = median(p.prefill_s / p.prefilled for p in points if p.rows == 1)
    if not overlapping:
        weights, token, row = _solve((np.ones(len(rows)), kv, rows), seconds)
        return Roofline(weights, token, row, 0.0, prefill, overlapping=False)
    starts = [rows <= border for border in sorted(set(rows.tolist()))]
    found = [_by_turns(rows, kv, seconds, start, prefill) for start in starts]
    return min(found, key=lambda one: float((errors(one, points) ** 2).sum()))


def errors(roofline: Roofline, points: Sequence[Point]) -> Row:
    """Of each point, relative."""
    return np.array(
        [abs(roofline.step_s(p.rows, p.kv_tokens) / p.seconds - 1) for p in points], np.float64
    )


def _by_turns(
    rows: Row, kv: Row, seconds: Row, reading: NDArray[np.bool_], prefill: float
) -> Roofline:
    """`reading` says at which points reading is what counts."""
    weights = token = row = overhead = 0.0
    for _ in range(TURNS_MAX):
        mine = reading.astype(np.float64)
        columns = (mine, mine * kv, (1 - mine) * rows, np.ones(len(rows)))
        weights, token, row, overhead = _solve(columns, seconds)
        looked = weights + kv * token >= rows * row
        if (looked == reading).all():
            break
        reading = looked
    return Roofline(weights, token, row, overhead, prefill)


def _solve(columns: Sequence[Row], seconds: Row) -> list[float]:
    """Non-negative least squares of relative errors: what comes out negative is left out."""
    kept = list(range(len(columns)))
    while kept:
        matrix = np.stack([columns[n] / seconds for n in kept], axis=1)
        found = np.linalg.lstsq(matrix, np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            by_column = dict(zip(kept, found.tolist(), strict=True))
            return [by_column.get(n, 0.0) for n in range(len(columns))]
        kept.remove(kept[int(found.argmin())])
    return [0.0] * len(columns)


def _doubling(most: int) -> list[int]:
    counts = [1]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    return [*counts, most] if most > 1 else counts


def _measure(timing: Timing, rows: int, length: int) -> Point:
    """One step per `poll(0)`; the first one prefills."""
    engine, names = timing.engine, [f"{rows}.{length}.{n}" for n in range(rows)]
    for name in names:
        engine.submit(_request(name, length, timing.vocabulary, rows))
    times = [_step(timing) for _ in range(STEPS)]
    # Whatever else this machine does only ever makes a step slower.
    seconds = float(np.quantile(times[1 + SKIPPED :], FASTEST))
    cached = length - 1 + (1 + SKIPPED + STEPS) / 2
    for name in names:
        engine.abort(name)
    prefill_s = max(0.0, times[0] - seconds)
    return Point(rows, rows * cached, seconds, length - 1, prefill_s)


def _step(timing: Timing) -> float:
    began = timing.clock()
    timing.engine.poll(0.0)
    return timing.clock() - began


def _request(name: str, length: int, vocabulary: int, seed: int) -> Request:
    """All of one point have the prompt in common, so that it is prefilled once; points have not."""
    tokens = (np.arange(length) * 7 + seed) % vocabulary
    nothing = np.zeros(0, np.float32)
    sources = np.full(length, PROMPT, np.uint8)
    sampling = Sampling(tokens_max=1 << 30)
    return Request(
        name, 1000 * length + seed, tokens.astype(np.uint32), sources, sampling, 0, nothing
    )
