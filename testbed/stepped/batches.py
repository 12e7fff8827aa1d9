"""Many seeded runs, a batch per process: threads left by crashes end with their process.

`python -m testbed.stepped.batches FIRST COUNT` is one batch; it prints one JSON object.
"""

import json
import logging
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field

from testbed.stepped.trials import seeded

BATCH = 100
BATCH_S = 1800.0


@dataclass
class BatchFindings:
    """The findings of all batches; a line of `wrong` ends with the command that repeats its run."""

    wrong: list[str] = field(default_factory=list[str])
    happened: Counter[str] = field(default_factory=Counter[str])


def seeded_batches(count: int, first: int = 0) -> BatchFindings:
    """Runs the seeds `first` to `first + count`."""
    findings = BatchFindings()
    for start in range(first, first + count, BATCH):
        size = min(BATCH, first + count - start)
        line = [sys.executable, "-m", "testbed.stepped.batches", str(start), str(size)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=BATCH_S, check=True)
        printed = json.loads(done.stdout)
        findings.wrong += printed["wrong"]
        findings.happened.update(printed["happened"])
    return findings


def main() -> None:
    logging.disable(logging.CRITICAL)
    first, count = int(sys.argv[1]), int(sys.argv[2])
    findings = BatchFindings()
    for seed in range(first, first + count):
        trial = seeded(seed)
        findings.happened += trial.happened
        if trial.found.wrong:
            findings.wrong.append(str(trial))
    print(json.dumps({"wrong": findings.wrong, "happened": findings.happened}))


if __name__ == "__main__":
    main()
