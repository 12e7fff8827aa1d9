"""Measures a recorded run from its index. An answer is one measurement of a decode step: its
rollout decoded a known number of answers meanwhile, and each step gave it one token.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist, fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.engines.roofline import Roofline
from rollstream.streams.records import Prompt, Record, RolloutStatus, WeightsAnnounced
from rollstream.streams.values import Version

if TYPE_CHECKING:  # imports DuckDB
    from rollstream.look.index.run_index import RunIndex

ANSWERS_MAX = 50_000  # newest finished answers that are kept
TOKENS_MIN = 8  # generated tokens of an answer that is a measurement: shorter ones are mostly waits
FIRST_STEPS = 2  # steps left out of the trainer's times: processes start and caches are cold

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """`prompt` and `tokens` count its prompt's and generated tokens. It `is_whole` if one rollout
    generated all of it.
    """

    rollout: str
    group: int
    index: int
    prompt: int
    tokens: int
    started_s: float
    finished_s: float
    is_whole: bool


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A token took `token_s` beside, on average, `rows` running answers (itself included) with
    `kv_tokens` cached tokens in all.
    """

    rows: float
    kv_tokens: float
    token_s: float


@dataclass(frozen=True, slots=True)
class DraftGain:
    """Per sequence and forward pass: `tokens_per_pass` generated tokens, `rows_per_pass` computed
    positions (its own and the draft tokens).
    """

    tokens_per_pass: float
    rows_per_pass: float


@dataclass(frozen=True, slots=True)
class RunMeasurements:
    """An unknown value is None, or empty. `groups` holds the lengths of the finished answers by
    group number, `prompts` is the number of prompts in a pass.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    prompt_tokens: int = 0
    prompts: int | None = None
    correlation: float = 0.0
    """Of the lengths of two answers to one prompt, between ranks (0: none, 1: equal)."""
    points: tuple[DecodePoint, ...] = ()
    trained_token_s: float | None = None
    """Of the trainer per token, prompts included, on that run's GPUs."""
    train_cpu_token_s: float | None = None
    """CPU seconds of all trainer threads per token, prompts included."""
    decode_cpu_token_s: float | None = None
    """CPU seconds of the engines per generated token."""
    steady_tokens_per_s: float | None = None
    """Trained tokens per second, after the first steps."""
    step_tokens: float | None = None
    publish_s: float | None = None
    """Pause of the trainer after a step."""
    arrive_s: float | None = None
    """From a step's end to the announcement of its version."""
    update_s: float | None = None
    """Of a rollout to take a version."""
    kv_capacity: int | None = None
    drafts: DraftGain | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted(length for group in self.groups for length in group))


# The newest finished answers.
ANSWERS = f"""
SELECT rollout, "group", index, prompt_tokens, tokens, started_s, finished_s,
    attempt = 1 AND moves = 0 FROM t WHERE finish != 'dead' ORDER BY finished_s DESC, p, o
LIMIT {ANSWERS_MAX}
"""
DRAFTED = """
SELECT sum(tokens)::BIGINT, sum(passes)::BIGINT, sum(guessed)::BIGINT FROM t
WHERE passes IS NOT NULL AND finish != 'dead'
"""
# Steps after the first ones, unless there are no others.
STEPS = f"""
SELECT version_term, version, time_s, coalesce(metrics['busy_s'], 0) AS busy_s,
    coalesce(metrics['seconds'], 0) AS seconds, coalesce(metrics['wait_s'], 0) AS wait_s,
    coalesce(metrics['tokens_trained'], 0) AS tokens_trained,
    coalesce(counts['trained'], 0) AS trained
FROM steps QUALIFY row_number() OVER (ORDER BY step) > {FIRST_STEPS}
    OR count(*) OVER () <= {FIRST_STEPS} ORDER BY step
"""


@dataclass(slots=True)
class MeasuredTopics:
    """Topics that a run's index lacks; a repeated record replaces itself."""

    announced: dict[Version, float] = field(default_factory=dict[Version, float])
    epochs: dict[int, int] = field(default_factory=dict[int, int])
    capacity: dict[str, int] = field(default_factory=dict[str, int])
    busy: dict[tuple[str, int], tuple[float, int]] = field(
        default_factory=dict[tuple[str, int], tuple[float, int]]
    )
    """CPU time and generated tokens by rollout and term."""

    def apply(self, record: Record) -> None:
        match record:
            case WeightsAnnounced():
                self.announced[record.version] = record.time_s
            case Prompt() if record.epoch:
                first_group = self.epochs.get(record.epoch, record.group)
                self.epochs[record.epoch] = min(first_group, record.group)
            case RolloutStatus():
                self.capacity[record.rollout] = record.kv_capacity
                self.busy[record.rollout, record.term] = record.busy_s, record.tokens_total
            case _:
                pass

    def decode_cpu_s(self) -> float | None:
        busy_s = sum(seconds for seconds, _ in self.busy.values())
        tokens = sum(tokens for _, tokens in self.busy.values())
        return busy_s / tokens if busy_s and tokens else None


def measure(index: "RunIndex", topics: MeasuredTopics, trainer_threads: int = 1) -> RunMeasurements:
    """The index must have been read with tokens. The trainer's `busy_s` is summed over
    `trainer_threads`.
    """
    rows = index.cursor().execute(ANSWERS).fetchall()
    answers = [FinishedAnswer(*row) for row in reversed(rows)]
    steps = index.rows(STEPS)
    prompt = fmean(answer.prompt for answer in answers) if answers else 0.0
    publish_s, arrive_s = _version_times(steps, topics.announced)
    work_s = _mean(_work_s(done, trainer_threads) for done in steps)
    step_tokens = _mean(done["tokens_trained"] + prompt * done["trained"] for done in steps)
    cpu_s = _mean(done["busy_s"] for done in steps)
    tokens, passes, guessed = index.cursor().execute(DRAFTED).fetchall()[0]
    return RunMeasurements(
        groups=_lengths_by_group(answers),
        prompt_tokens=round(prompt),
        prompts=min((first // epoch for epoch, first in topics.epochs.items()), default=None),
        correlation=length_correlation(answers),
        points=tuple(decode_points(answers)),
        trained_token_s=work_s / step_tokens if step_tokens else None,
        train_cpu_token_s=cpu_s / step_tokens if step_tokens else None,
        decode_cpu_token_s=topics.decode_cpu_s(),
        steady_tokens_per_s=_steady_tokens_per_s(steps),
        step_tokens=step_tokens or None,
        publish_s=publish_s,
        arrive_s=arrive_s,
        update_s=index.value("SELECT median(seconds) FROM served"),
        kv_capacity=min(topics.capacity.values(), default=None),
        drafts=DraftGain(tokens / passes, (passes + guessed) / passes) if guessed else None,
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return fmean(known) if known else 0.0


def _work_s(done: Mapping[str, float], trainer_threads: int) -> float:
    # The trainer waits and computes at once: at least the time without waits, and the computing
    # time of its threads.
    return max(done["seconds"] - done["wait_s"], done["busy_s"] / trainer_threads)


def _steady_tokens_per_s(steps: Sequence[Mapping[str, float]]) -> float | None:
    # Steps repeat after a restart of the trainer.
    if len(steps) < 2 or steps[0]["version_term"] != steps[-1]["version_term"]:
        return None
    tokens = sum(done["tokens_trained"] for done in steps[1:])
    return tokens / max(1e-9, steps[-1]["time_s"] - steps[0]["time_s"])


def _version_times(
    steps: Sequence[Mapping[str, Any]], announced: Mapping[Version, float]
) -> tuple[float | None, float | None]:
    pauses = [
        max(0.0, b["time_s"] - a["time_s"] - b["seconds"])
        for a, b in pairwise(steps)
        if a["version_term"] == b["version_term"]
    ]
    versions = [(Version(done["version"], done["version_term"]), done["time_s"]) for done in steps]
    arrive = [max(0.0, announced[v] - time_s) for v, time_s in versions if v in announced]
    return median(pauses) if pauses else None, median(arrive) if arrive else None


def _lengths_by_group(answers: Sequence[FinishedAnswer]) -> tuple[tuple[int, ...], ...]:
    lengths: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for answer in answers:
        lengths[answer.group][answer.index] = answer.tokens
    ends = 1 + max(lengths, default=-1)
    # () for a group without finished answers.
    return tuple(tuple(n for _, n in sorted(lengths.get(g, {}).items())) for g in range(ends))


def decode_points(answers: Sequence[FinishedAnswer]) -> list[DecodePoint]:
    """One for each whole answer, from all answers of its rollout."""
    by_rollout: defaultdict[str, list[FinishedAnswer]] = defaultdict(list)
    # Answers that never finished are missing, so the last ones of a killed run seem a little fast.
    for answer in answers:
        if answer.finished_s > answer.started_s:
            by_rollout[answer.rollout].append(answer)
    return [point for group in by_rollout.values() for point in _points_of_rollout(group)]


def _points_of_rollout(answers: Sequence[FinishedAnswer]) -> list[DecodePoint]:
    # Small numbers, because squares of times are subtracted.
    origin = min(answer.started_s for answer in answers)
    begin = np.array([answer.started_s - origin for answer in answers])
    end = np.array([answer.finished_s - origin for answer in answers])
    tokens = np.array([float(answer.tokens) for answer in answers])
    prompt = np.array([float(answer.prompt) for answer in answers])
    speed = tokens / (end - begin)
    # Between two starts or ends the rows are constant and the cached tokens grow evenly: both are
    # integrated exactly, and their means follow.
    at = np.unique(np.concatenate([begin, end]))
    rows = _stepwise(at, begin, end, np.ones(len(answers)))
    level = _stepwise(at, begin, end, prompt - speed * begin)
    slope = _stepwise(at, begin, end, speed)
    row_s = _integral(rows[:-1] * np.diff(at))
    kv_s = _integral(level[:-1] * np.diff(at) + slope[:-1] * np.diff(at**2) / 2)
    first, last = np.searchsorted(at, begin), np.searchsorted(at, end)
    seconds = end - begin
    mean_rows, mean_kv = (
        (row_s[last] - row_s[first]) / seconds,
        (kv_s[last] - kv_s[first]) / seconds,
    )
    return [
        DecodePoint(float(mean_rows[i]), float(mean_kv[i]), float(seconds[i] / tokens[i]))
        for i, answer in enumerate(answers)
        if answer.is_whole and answer.tokens >= TOKENS_MIN
    ]


def fit_step_times(points: Sequence[DecodePoint]) -> Roofline:
    """The least squared relative errors at the points: times of weights, rows and cached tokens,
    none negative.
    """
    rows = np.array([point.rows for point in points])
    kv = np.array([point.kv_tokens for point in points])
    seconds = np.array([point.token_s for point in points])
    columns = [np.ones(len(points)), rows, kv]
    means = [max(1e-12, float(column.mean())) for column in columns]
    active, solved = [0, 1, 2], np.zeros(3)
    while active:
        matrix = np.stack([columns[n] / means[n] / seconds for n in active], axis=1)
        # Of points with like batches lstsq shares the time out evenly.
        coefficients = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)[0]
        if (coefficients >= 0).all():
            solved[active] = coefficients
            break
        active.remove(active[int(coefficients.argmin())])
    weights_s, row_s, kv_s = (float(solved[n] / means[n]) for n in range(3))
    return Roofline(weights_s, kv_s, row_s, overlapping=False)


def _stepwise(at: FloatArray, begin: FloatArray, end: FloatArray, value: FloatArray) -> FloatArray:
    """The sum of `value` over the answers that run from each time of `at` to the next."""
    changes = np.zeros(len(at))
    np.add.at(changes, np.searchsorted(at, begin), value)
    np.add.at(changes, np.searchsorted(at, end), -value)
    return np.cumsum(changes)


def _integral(pieces: FloatArray) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(pieces)])


def length_correlation(answers: Sequence[FinishedAnswer]) -> float:
    """Returns the length correlation of two answers to one prompt, by their ranks among all answers
    as normal deviates (the simulator's copula): the mean product of such pairs. 0 without any.
    """
    if not answers:
        return 0.0
    order = np.argsort(
        np.argsort([answer.tokens for answer in answers], kind="stable"), kind="stable"
    )
    normal = NormalDist()
    deviates = [normal.inv_cdf((rank + 0.5) / len(answers)) for rank in order.tolist()]
    by_group: defaultdict[int, list[float]] = defaultdict(list)
    for answer, deviate in zip(answers, deviates, strict=True):
        by_group[answer.group].append(deviate)
    products = pairs = 0.0
    for group in by_group.values():
        products += sum(group) ** 2 - sum(deviate * deviate for deviate in group)
        pairs += len(group) * (len(group) - 1)
    return min(1.0, max(0.0, products / pairs)) if pairs else 0.0
