"""Lines of `metrics/trainer.jsonl`: one per `StepDone`, so that people and forwarders need not read
the log.

The ledger is the source of truth. A crash between a `StepDone` and its line leaves a line missing,
which the next term adds; a repeated step with equal hashes adds none. A step that was repeated as a
fork has a second line, of the higher term: the last line of a step is the valid one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from rollstream.streams.records import StepDone


def step_line(done: StepDone, publish_s: float | None) -> dict[str, Any]:
    """The line of a step; `publish_s` (seconds) is None in a line that the next term added."""
    head = {"step": done.step, "term": done.version.term, "time_s": done.time_s}
    return {**head, **done.metrics, **done.counts, "publish_s": publish_s}


def missing_lines(
    recorded: Mapping[int, StepDone], lines: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Lines of recorded steps that the file does not have, in the order of steps."""
    there = {(line.get("step"), line.get("time_s")) for line in lines}
    return [
        step_line(done, None)
        for step, done in sorted(recorded.items())
        if (step, done.time_s) not in there
    ]
