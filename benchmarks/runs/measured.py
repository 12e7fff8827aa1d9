"""One run of the product in processes of its own, and its speed from the log.

The clock starts with the first admission, when generation may start, and stops with the last
`StepDone`: start-up, warm-up and evaluation are excluded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollstream.run.config.config import load
from rollstream.run.config.run_folder import bus_url
from rollstream.storage.metrics_file import read_metrics
from rollstream.streams.connect import open_bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Admitted, Record, RolloutStatus, StepDone
from testbed.run_driver import HERE, RunDriver

TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Trained tokens and seconds; `busy_s` is the CPU time spent on tokens that were trained."""

    folder: Path
    tokens: float
    seconds: float
    busy_s: float
    peak_mb: Mapping[str, float]
    started_s: float
    done_s: Mapping[int, float]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def busy(self) -> float:
        """Share of two cores."""
        return self.busy_s / (2 * self.seconds)


def run(
    configuration: Path,
    folder: Path,
    overrides: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Measured:
    """Starts the run, waits for its end and reads its log; a run that fails raises with its output.
    `environment` is added to that of this process.
    """
    with RunDriver(folder, configuration, overrides, environment=environment or {}) as driver:
        driver.start().wait(bound_s=TIMEOUT_S)
    return measure(folder)


def measure(folder: Path) -> Measured:
    """Measures a finished run from its log."""
    configuration = load(folder / "config.json")
    bus = open_bus(bus_url(configuration, folder))
    admissions = [r for r in _read(bus, "admissions") if isinstance(r[1], Admitted)]
    steps = [r for _, r in _read(bus, "ledger") if isinstance(r, StepDone)]
    newest: dict[str, RolloutStatus] = {}
    for _, record in _read(bus, "status"):
        if isinstance(record, RolloutStatus):
            newest[record.rollout] = record
    bus.close()
    started_s = admissions[0][0] / 1000
    trained = sum(step.metrics["tokens_trained"] for step in steps)
    generated = sum(status.tokens_total for status in newest.values())
    decode_s = sum(status.busy_s for status in newest.values()) * trained / generated
    train_s = sum(step.metrics["busy_s"] for step in steps)
    return Measured(
        folder,
        trained,
        steps[-1].time_s - started_s,
        decode_s + train_s,
        _peaks(folder),
        started_s,
        {step.step: step.time_s for step in steps},
    )


def _read(bus: object, topic: str) -> list[tuple[int, Record]]:
    reader = TopicReader(bus, topic, from_begin(bus, topic))  # type: ignore[arg-type]
    return [(r.timestamp_ms, r.record) for r in reader.read_to(bus.end(topic))]  # type: ignore[attr-defined]


def _peaks(folder: Path) -> dict[str, float]:
    """Peak resident memory of each role, in MB, as it wrote it when it ended."""
    found: dict[str, float] = {}
    for path in sorted((folder / "metrics").glob("process-*.jsonl")):
        lines = read_metrics(path)
        if lines:
            found[path.stem.removeprefix("process-")] = max(line["peak_mb"] for line in lines)
    return found


def evaluated(folder: Path, versions: Sequence[int], samples: int) -> dict[int, dict[str, float]]:
    """Lines of `rollstream eval` on stored versions, by version."""
    words = ("--versions", ",".join(map(str, versions)), "--samples", str(samples), "--json")
    done = HERE.run("eval", str(folder / "config.json"), *words, bound_s=TIMEOUT_S)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {int(line["step"]): line for line in lines}
