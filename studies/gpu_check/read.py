"""Speed metrics of a run, from its log alone: pure except for reading it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rollstream.errors import BusError
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import open_run_log_for_writing
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Applied, Record, StepDone, Take, Trajectory

COLD_STEPS = 2
"""The first steps, in which kernels are chosen and memory is allocated, are skipped."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Tokens per second; `alone` is before the trainer's first micro-batch, `beside` after it. None
    where the run ended before.
    """

    steps: tuple[StepDone, ...]
    answers: tuple[Trajectory, ...]
    alone: float | None
    beside: float | None
    pauses_s: tuple[float, ...]

    def trained_per_s(self) -> float | None:
        """Tokens, prompts included, through forward and backward passes per second of a step,
        without waiting time.
        """
        warm = self.steps[COLD_STEPS:]
        seconds = sum(one.metrics["seconds"] - one.metrics["wait_s"] for one in warm)
        generated = sum(len(one.logprobs) for one in self.answers)
        whole = sum(len(one.tokens) for one in self.answers)
        if not warm or not generated or seconds <= 0:
            return None
        return sum(one.metrics["tokens_trained"] for one in warm) * whole / generated / seconds

    def mismatch(self) -> tuple[float, float, float] | None:
        """KL, mean |Δ log p| and the number of tokens of lag 0, over all steps."""
        compared = [one.metrics for one in self.steps if one.metrics.get("mismatch_tokens")]
        tokens = sum(one["mismatch_tokens"] for one in compared)
        if not tokens:
            return None
        kl, mean = (
            sum(one[name] * one["mismatch_tokens"] for one in compared) / tokens
            for name in ("mismatch_kl", "mismatch_mean")
        )
        return kl, mean, tokens

    def pause(self) -> tuple[float, float] | None:
        """Median and longest pause of a rollout for a version; the first one is its start."""
        later = self.pauses_s[1:]
        return (median(later), max(later)) if later else None


def seen(folder: Path) -> Seen:
    """A run that ended or was stopped; any part of it may be missing."""
    configuration = load(folder / "config.json")
    log = open_run_log_for_writing(configuration, folder)
    try:
        ledger = _read(log, "ledger")
        answers = [r for _, r in _read(log, "trajectories") if isinstance(r, Trajectory)]
        applied = [r for _, r in _read(log, "applied") if isinstance(r, Applied)]
    finally:
        log.close()
    living = [one for one in answers if one.finish != "dead" and one.started_s < one.finished_s]
    taken = [at for at, record in ledger if isinstance(record, Take)]
    steps = [record for _, record in ledger if isinstance(record, StepDone)]
    begin = min((one.started_s for one in living), default=0.0)
    middle = min(taken, default=begin)
    end = steps[-1].time_s if steps else middle
    return Seen(
        tuple(steps),
        tuple(living),
        _rate(living, begin, middle),
        _rate(living, middle, end),
        tuple(one.seconds for one in sorted(applied, key=lambda one: one.time_s)),
    )


def _rate(answers: Sequence[Trajectory], begin: float, end: float) -> float | None:
    """Spreads an answer's tokens evenly over its time."""
    if end <= begin:
        return None
    tokens = 0.0
    for one in answers:
        inside = min(end, one.finished_s) - max(begin, one.started_s)
        tokens += len(one.logprobs) * max(0.0, inside) / (one.finished_s - one.started_s)
    return tokens / (end - begin)


def _read(log: object, topic: str) -> list[tuple[float, Record]]:
    try:
        reader = TopicReader(log, topic, from_begin(log, topic))  # type: ignore[arg-type]
        found = reader.read_to(log.end(topic))  # type: ignore[attr-defined]
        return [(one.timestamp_ms / 1000, one.record) for one in found]
    except BusError:  # a run that ended early has no such topic
        return []
