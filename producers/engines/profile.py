"""Measures the decode steps of an engine on this machine, and fits a roofline to them."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from rollstream.errors import ConfigurationError
from rollstream.foreign_json import parse_json
from rollstream.producers.engines.base import Engine, GenerationRequest
from rollstream.producers.engines.roofline import Roofline, batch_max
from rollstream.streams.records import PROMPT
from rollstream.streams.values import Sampling
from rollstream.whole_file import output_file

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SHAPE_FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
"""Fields of a model's `config.json` on which its step times depend."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """`model` is as `model_key` returns it; `batch_max` is B_max (`roofline.batch_max`). The fit is
    to `points` step times; `error` is the median relative error.
    """

    engine: str
    model: str
    device: str
    slots: int
    context_max: int
    roofline: Roofline
    batch_max: int
    error: float
    error_max: float
    points: int


def model_key(config: "PreTrainedConfig", changed: Mapping[str, object]) -> str:
    """Returns all on which step times depend: a model's shape and `changed`, the engine's
    non-default settings.
    """
    fields = {name: getattr(config, name, None) for name in SHAPE_FIELDS} | {**changed}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def profile_path(folder: Path, engine: str, model: str) -> Path:
    return folder / "profiles" / f"{engine}-{model}.json"


def write_profile(path: Path, profile: EngineProfile, is_typed: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with output_file(path, is_typed) as partial:
        partial.write_text(json.dumps(asdict(profile), indent=2) + "\n", encoding="utf-8")


def read_profile(path: str | Path) -> EngineProfile:
    """Read a profile. Raises `ConfigurationError` if the file is missing or holds no profile."""
    try:
        profile = parse_json(Path(path).read_bytes(), EngineProfile)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is no profile ({error}); `rollstream profile CONFIG` writes one"
        ) from None
    if not (profile.batch_max >= 1 and profile.roofline.step_s(1, 0) > 0):
        raise ConfigurationError(f"{path} is no profile: a step of no time, or B_max below 1")
    return profile


STEPS = 16  # steps for each measured point; the first one also prefills
SKIPPED_STEPS = 2  # steps after the first one whose times are not counted either
FASTEST_SHARE = 0.25  # quantile of a point's step times that is taken as its step time
CONTEXT_MIN = 4 * STEPS  # in a shorter context sequences would end while they are timed
KV_SHARES = (0.05, 0.25, 0.5, 0.85)  # measured lengths of a sequence, as shares of the context
ALTERNATIONS_MAX = 30  # of one fit (`_fit_alternating`)

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepTiming:
    """A step of `rows` sequences with `kv_tokens` cached tokens; prefilling `prefilled` tokens took
    `prefill_s`.
    """

    rows: int
    kv_tokens: float
    seconds: float
    prefilled: int
    prefill_s: float


@dataclass(frozen=True, slots=True)
class TimedEngine:
    engine: Engine
    slots: int
    context_max: int
    vocabulary: int
    clock: Callable[[], float] = time.perf_counter

    def points(self) -> Iterator[StepTiming]:
        """Measure every batch size (powers of two up to `slots`, and `slots`) at every length of
        `KV_SHARES`.
        """
        rows = _batch_sizes(self.slots)
        room = self.context_max - STEPS - 1
        for length in sorted(
            {min(room, max(2, int(share * self.context_max))) for share in KV_SHARES}
        ):
            for count in rows:
                yield self._measure(count, length)

    def _measure(self, rows: int, length: int) -> StepTiming:
        engine, names = self.engine, [f"{rows}.{length}.{n}" for n in range(rows)]
        for name in names:
            engine.submit(_request(name, length, self.vocabulary, rows))
        # Each call makes one decode step, and the first one also prefills.
        times = [self._step() for _ in range(STEPS)]
        # Other load on this machine can only make a step slower, so a low quantile is taken.
        seconds = float(np.quantile(times[1 + SKIPPED_STEPS :], FASTEST_SHARE))
        # Tokens in the cache for one row, as a mean over the counted steps: each adds one token.
        cached = length - 1 + (1 + SKIPPED_STEPS + STEPS) / 2
        for name in names:
            engine.abort(name)
        prefill_s = max(0.0, times[0] - seconds)
        return StepTiming(rows, rows * cached, seconds, length - 1, prefill_s)

    def _step(self) -> float:
        began = self.clock()
        self.engine.poll(0.0)
        return self.clock() - began


def fit_profile(
    engine: str, model: str, slots: int, context_max: int, points: Sequence[StepTiming]
) -> EngineProfile:
    """Returns the roofline's form with the smaller median error; the caller adds the device."""
    # The engine reads memory while it computes, or reads and then computes.
    fits = [fit_roofline(points, overlapping) for overlapping in (True, False)]
    roofline = min(fits, key=lambda fit: float(np.median(relative_errors(fit, points))))
    errors = relative_errors(roofline, points)
    return EngineProfile(
        engine=engine,
        model=model,
        device="",
        slots=slots,
        context_max=context_max,
        roofline=roofline,
        batch_max=batch_max(roofline, slots),
        error=float(np.median(errors)),
        error_max=float(errors.max()),
        points=len(points),
    )


def fit_roofline(points: Sequence[StepTiming], overlapping: bool) -> Roofline:
    """Returns the roofline with the least sum of squared relative errors. With `overlapping` a
    point takes the longer of memory reads and arithmetic, plus a constant overhead; otherwise their
    sum.
    """
    rows = np.array([p.rows for p in points], np.float64)
    kv = np.array([p.kv_tokens for p in points], np.float64)
    seconds = np.array([p.seconds for p in points])
    # All rows of a point share one prompt, which is prefilled once, so the points with one row
    # measure a prefill best.
    prefill = median(p.prefill_s / p.prefilled for p in points if p.rows == 1)
    if not overlapping:
        weights, token, row = _solve((np.ones(len(rows)), kv, rows), seconds)
        return Roofline(weights, token, row, 0.0, prefill, overlapping=False)
    starts = [rows <= border for border in sorted(set(rows.tolist()))]
    fits = [_fit_alternating(rows, kv, seconds, start, prefill) for start in starts]
    return min(fits, key=lambda fit: float((relative_errors(fit, points) ** 2).sum()))


def relative_errors(roofline: Roofline, points: Sequence[StepTiming]) -> FloatArray:
    return np.array(
        [abs(roofline.step_s(p.rows, p.kv_tokens) / p.seconds - 1) for p in points], np.float64
    )


def _fit_alternating(
    rows: FloatArray,
    kv: FloatArray,
    seconds: FloatArray,
    reading: NDArray[np.bool_],
    prefill: float,
) -> Roofline:
    # `reading` guesses the points at which memory reads take longer than arithmetic; each round
    # fits the constants for this assignment, and assigns the points again by them.
    weights = token = row = overhead = 0.0
    for _ in range(ALTERNATIONS_MAX):
        by_reads = reading.astype(np.float64)
        columns = (by_reads, by_reads * kv, (1 - by_reads) * rows, np.ones(len(rows)))
        weights, token, row, overhead = _solve(columns, seconds)
        assigned = weights + kv * token >= rows * row
        if (assigned == reading).all():
            break
        reading = assigned
    return Roofline(weights, token, row, overhead, prefill)


def _solve(columns: Sequence[FloatArray], seconds: FloatArray) -> list[float]:
    active = list(range(len(columns)))
    while active:
        matrix = np.stack([columns[n] / seconds for n in active], axis=1)
        solved = np.linalg.lstsq(matrix, np.ones(len(seconds)), rcond=None)[0]
        if (solved >= 0).all():
            by_column = dict(zip(active, solved.tolist(), strict=True))
            return [by_column.get(n, 0.0) for n in range(len(columns))]
        # No coefficient may be negative: this column is left out and gets 0.
        active.remove(active[int(solved.argmin())])
    return [0.0] * len(columns)


def _batch_sizes(slots: int) -> list[int]:
    counts = [1]
    while counts[-1] * 2 < slots:
        counts.append(counts[-1] * 2)
    return [*counts, slots] if slots > 1 else counts


def _request(name: str, length: int, vocabulary: int, seed: int) -> GenerationRequest:
    # Requests of one point share group and prompt, so the engine prefills it once; different points
    # share neither.
    tokens = (np.arange(length) * 7 + seed) % vocabulary
    nothing = np.zeros(0, np.float32)
    sources = np.full(length, PROMPT, np.uint8)
    sampling = Sampling(tokens_max=1 << 30)
    return GenerationRequest(
        name, 1000 * length + seed, tokens.astype(np.uint32), sources, sampling, 0, nothing
    )
