"""The same run over a Kafka broker and an S3 bucket, on third-party servers: two URLs change, and
the log holds the same counts afterwards.
"""

import json
import subprocess
import sys
from pathlib import Path

from testbed.run_process import STEPS, assert_the_log_adds_up, started
from testbed.servers import kafka_broker, versity
from testbed.waiting import WAIT_S


def asked(*line: str) -> list[dict]:
    """The JSON lines that a command prints about the run."""
    command = [sys.executable, "-m", "rollstream", *line, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(text) for text in done.stdout.splitlines()]


def test_a_run_over_kafka_and_s3_trains_every_step_and_the_counts_add_up(
    tmp_path: Path, model: Path
) -> None:
    """Promise 4; invariants 1 and 2 over log and archive. The commands read everything from
    there.
    """
    folder = tmp_path / "run"
    urls = [f"bus={kafka_broker.new_url()}", f"store={versity.new_url()}"]
    with started(folder, model, urls) as process:
        code = process.wait(WAIT_S)
    assert code == 0, (tmp_path / "output.txt").read_text()
    assert_the_log_adds_up(folder)
    assert not (folder / "bus").exists()
    assert not (folder / "store").exists()
    assert (folder / "report.html").stat().st_size > 10_000
    run = str(folder)
    assert asked("query", "SELECT max(step) AS last FROM steps", "--run", run) == [{"last": STEPS}]
    assert asked("tail", "ledger", run, "--last", "1")[0]["step"] == STEPS
    assert asked("inspect", "--last", run)[0]["trajectory"]
    assert asked("top", run, "--once")[0]["step"] == STEPS
