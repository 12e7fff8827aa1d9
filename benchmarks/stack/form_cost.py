"""Measures what the form of containers costs (`stack_form_cost`): trained tokens per second of the
roles of docker-compose.yml in containers, over those of the same programs as processes in no
container (`testbed/stack/processes.py`), with the same broker and object store in containers.

Pairs alternate in their order. The first steps of a run are left out: a start of processes is not
what is compared. Each pair takes minutes, and its result is kept in a folder of the system's
temporary ones until all are measured: `python -m benchmarks.stack.form_cost 1` measures the next.
"""

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.case import Case, paired
from benchmarks.kept import kept, kept_folder
from testbed.stack.compose import ROLES, Stack, wait_until
from testbed.stack.daemon import StackDaemon
from testbed.stack.images import built_daemon
from testbed.stack.processes import processes

PAIRS, PAIRS_QUICK = 7, 1
GOAL = 0.95
BOUND_S = 3600.0
SKIPPED = 4  # steps at the begin of each run
SETTINGS = {
    "TRAINER__STEPS": "20",
    "WARMUP__STEPS": "60",
    "WARMUP__DOCUMENTS": "1000",
    "EVALUATION__ENABLED": "false",
}


def measured(daemon: StackDaemon, pair: int, folder: Path) -> tuple[float, float]:
    """Returns the tokens per second in containers and as processes of a pair: those that are kept,
    or new ones, which are kept then.
    """

    def measure() -> list[float]:
        order = (True, False) if pair % 2 == 0 else (False, True)
        found = {contained: _speed(daemon, contained) for contained in order}
        return [found[True], found[False]]

    contained, free = kept(folder / f"{pair:02d}.json", measure)
    return contained, free


def _speed(daemon: StackDaemon, contained: bool) -> float:
    stack = Stack(daemon, SETTINGS)
    stack.down(with_data=True)
    try:
        stack.up("kafka", "object-store", "bucket", "warmup")
        wait_until(stack, ["bucket", "warmup"], "ended", BOUND_S)
        if contained:
            stack.up(*ROLES)
            wait_until(stack, ROLES, "ended", BOUND_S)
        else:
            with processes(stack, ROLES) as started:
                end = time.monotonic() + BOUND_S
                while any(one.poll() is None for one in started.values()):
                    assert time.monotonic() < end, "the processes have not ended"
                    time.sleep(0.5)
                codes = {name: one.returncode for name, one in started.items()}
                assert set(codes.values()) == {0}, codes
        text = stack.run("report", "cat", "/run/rollstream/metrics/trainer.jsonl")
        return _tokens_per_second([json.loads(line) for line in text.splitlines()])
    finally:
        stack.down(with_data=True)


def _tokens_per_second(steps: Sequence[dict[str, float]]) -> float:
    timed = steps[SKIPPED:]
    tokens = sum(step["tokens_trained"] for step in timed[1:])
    return tokens / (timed[-1]["time_s"] - timed[0]["time_s"])


def cases(daemon: StackDaemon, quick: bool) -> Iterator[Case]:
    """Seven pairs; quick: one."""
    folder = kept_folder("form-cost", quick)
    count = PAIRS_QUICK if quick else PAIRS
    found = [measured(daemon, pair, folder) for pair in range(count)]
    values, references = zip(*found, strict=True)
    yield paired("stack_form_cost", values, "tokens/s", "roles as processes", references, GOAL)
    shutil.rmtree(folder)


def main(most: int) -> None:
    """Measure the next pairs, at most this many, and print all that are kept."""
    folder = kept_folder("form-cost", quick=False)
    missing = [pair for pair in range(PAIRS) if not (folder / f"{pair:02d}.json").exists()]
    with built_daemon() as daemon:
        for pair in missing[:most]:
            print(pair, measured(daemon, pair, folder), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS)
