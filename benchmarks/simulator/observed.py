"""A real run in the simulator's terms: its speed and busy share, the lengths of its answers, and
the seconds that versions and training took.
"""

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.runs.watched import Watched
from rollstream.run.config.settings import Configuration
from rollstream.simulator.experiment import Prediction
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import (
    Applied,
    Record,
    RolloutStatus,
    StepDone,
    Trajectory,
    WeightsAnnounced,
)


@dataclass(frozen=True, slots=True)
class Overheads:
    """Wall-clock seconds: from a step's end until its version is announced, of a swap, and of a
    trained token; and the share of a rollout's time that is decoding while something runs (between
    two steps it reads assignments, publishes, sends its status).
    """

    publish_s: float
    update_s: float
    train_token_s: float
    decoding: float


@dataclass(frozen=True, slots=True)
class Asked:
    """The run's work: the lengths of the answers of each group, and the prompt's length."""

    lengths: tuple[tuple[int, ...], ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Real:
    """A run's configuration, the steps before its window, its measurements, and its work."""

    configuration: Configuration
    skipped: int
    found: Prediction
    overheads: Overheads
    work: Asked


def observed(run: Watched, first: int, last: int) -> Prediction:
    """Between the ends of two steps: trained tokens per second, and the rollouts' heartbeats."""
    begin_s, end_s = run.steps[first].time_s, run.steps[last].time_s
    tokens = sum(run.steps[step].metrics["tokens_trained"] for step in range(first + 1, last + 1))
    kv = whole = busy_s = 0.0
    for beats in run.beats.values():
        busy_s += _busy_by(beats, end_s) - _busy_by(beats, begin_s)
        for beat, after in pairwise(beats):
            seconds = min(after.time_s, end_s) - max(beat.time_s, begin_s)
            if seconds > 0:
                whole += seconds
                kv += seconds * (beat.kv_used + after.kv_used) / 2 / beat.kv_capacity
    return Prediction(tokens / (end_s - begin_s), kv / whole, 1 - busy_s / whole)


def decoding_of(run: Watched, first: int, last: int) -> float:
    """Between the ends of two steps, over heartbeats between which a rollout was never empty."""
    begin_s, end_s = run.steps[first].time_s, run.steps[last].time_s
    whole = busy_s = 0.0
    for beats in run.beats.values():
        for beat, after in pairwise(beats):
            if begin_s <= beat.time_s and after.time_s <= end_s and beat.running and after.running:
                whole += after.time_s - beat.time_s
                busy_s += after.busy_s - beat.busy_s
    return min(1.0, busy_s / whole)


def _busy_by(beats: Sequence[RolloutStatus], time_s: float) -> float:
    """Seconds of prefill and decode by then, linear between two heartbeats."""
    at = bisect_right([beat.time_s for beat in beats], time_s)
    if not 0 < at < len(beats):
        return beats[max(0, at - 1)].busy_s
    one, other = beats[at - 1], beats[at]
    share = (time_s - one.time_s) / (other.time_s - one.time_s)
    return one.busy_s + share * (other.busy_s - one.busy_s)


def overheads_of(bus: Bus, decoding: float) -> Overheads:
    """Medians over the run's versions and swaps; training over all its steps."""
    steps = [record for record in _read(bus, "ledger") if isinstance(record, StepDone)]
    done_s = {step.version: step.time_s for step in steps}
    out = [record for record in _read(bus, "weights") if isinstance(record, WeightsAnnounced)]
    lasted = [one.time_s - done_s[one.version] for one in out if one.version in done_s]
    swaps = [record.seconds for record in _read(bus, "applied") if isinstance(record, Applied)]
    trained = sum(step.metrics["tokens_trained"] for step in steps)
    return Overheads(
        max(0.0, statistics.median(lasted)),
        statistics.median(swaps),
        sum(step.metrics["busy_s"] for step in steps) / trained,
        decoding,
    )


def asked(bus: Bus) -> Asked:
    """Lengths of finished groups; the first completion of a trajectory counts."""
    found: dict[int, dict[int, int]] = {}
    prompts: list[int] = []
    for record in _read(bus, "trajectories"):
        if isinstance(record, Trajectory) and record.finish != "dead":
            found.setdefault(record.group, {}).setdefault(record.index, len(record.logprobs))
            prompts.append(len(record.tokens) - len(record.logprobs))
    groups = [found.get(group, {}) for group in range(1 + max(found))]
    lengths = tuple(tuple(group[index] for index in sorted(group)) for group in groups)
    return Asked(lengths, round(statistics.fmean(prompts)))


def _read(bus: Bus, topic: str) -> Iterator[Record]:
    for received in TopicReader(bus, topic, from_begin(bus, topic)).read_to(bus.end(topic)):
        yield received.record
