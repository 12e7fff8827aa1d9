"""The same run over a broker and a bucket, on servers that nobody here wrote: two URLs change, and
the log says the same afterwards.
"""

import subprocess
import sys
from pathlib import Path

from streams.records import Admitted, StepDone
from tests.run_process import (
    STEPS,
    WAIT_S,
    assert_the_log_adds_up,
    read,
    started,
)
from tests.servers import kafka_broker, versity


def asked(*line: str) -> str:
    """What a command of ours says about the run."""
    done = subprocess.run(
        [sys.executable, "-m", "rollstream", *line],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_over_kafka_and_s3_trains_every_step_and_the_counts_add_up(
    tmp_path: Path, model: Path
) -> None:
    """Promise 4; invariants 1 and 2 over log and archive."""
    folder = tmp_path / "run"
    urls = [f"bus={kafka_broker.new_url()}", f"store={versity.new_url()}"]
    with started(folder, model, urls) as process:
        code = process.wait(WAIT_S)
    assert code == 0, (tmp_path / "output.txt").read_text()
    assert_the_log_adds_up(folder)
    assert not (folder / "bus").exists()
    assert not (folder / "store").exists()
    assert (folder / "report.html").stat().st_size > 10_000
    steps = asked("query", str(folder), "select count(*) as n from steps", "--json")
    assert f'"n": {STEPS}' in steps or f'"n":{STEPS}' in steps
    assert len(read(folder, "admissions", Admitted)) >= len(read(folder, "ledger", StepDone))
