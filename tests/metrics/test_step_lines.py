"""`metrics/trainer.jsonl` has one valid line per `StepDone`, whatever died in between."""

from pathlib import Path

from rollstream.consumers.trainer.totals import missing_lines, step_line
from rollstream.storage.metrics_file import MetricsFile, read_metrics
from rollstream.streams.connect import open_bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import StepDone
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter


def logged(folder: Path, *steps: StepDone) -> dict[int, StepDone]:
    """As a new term finds them in the ledger."""
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    bus.create(catalogue())
    writer = FencedWriter(bus, "ledger", "trainer", 1)
    writer.open()
    writer.append([("run", step) for step in steps])
    reader = TopicReader(bus, "ledger", from_begin(bus, "ledger"))
    found = [received.record for received in reader.read_to(bus.end("ledger"))]
    bus.close()
    return {done.step: done for done in found if isinstance(done, StepDone)}


def step_done(step: int, time_s: float, term: int = 1) -> StepDone:
    return StepDone(step, Version(step, term), "ab", 3, {"loss": 0.1}, {"groups": 4}, time_s)


def test_a_line_that_a_crash_kept_from_being_written_is_added_once(tmp_path: Path):
    done = logged(tmp_path, *(step_done(n, 1700000000.1 + n / 3) for n in (1, 2, 3)))
    path = tmp_path / "trainer.jsonl"
    with MetricsFile(path) as metrics:
        metrics.append(step_line(done[1], 0.5))
        metrics.append(step_line(done[2], 0.5))
    for _ in range(2):
        with MetricsFile(path) as metrics:
            for line in missing_lines(done, read_metrics(path)):
                metrics.append(line)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    assert read_metrics(path)[-1] == {
        "step": 3, "term": 1, "time_s": done[3].time_s, "loss": 0.1, "groups": 4, "publish_s": None
    }  # fmt: skip


def test_a_fork_has_a_later_line_of_a_higher_term_which_stands(tmp_path: Path):
    forked = {1: step_done(1, 20.0, term=2)}
    lines = [step_line(step_done(1, 10.0), 0.1)]
    added = missing_lines(forked, lines)
    assert [line["term"] for line in (*lines, *added)] == [1, 2]
