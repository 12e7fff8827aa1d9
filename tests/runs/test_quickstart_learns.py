"""The quickstart as a newcomer runs it, for each of three seeds: the model learns."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.storage.metrics_file import read_metrics
from testbed.repository import EXAMPLES

QUICKSTART = EXAMPLES / "quickstart.toml"


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(1, marks=pytest.mark.long),
        pytest.param(2, marks=pytest.mark.long),
    ],
)
def test_sampled_accuracy_rises_and_lengths_have_a_long_tail(tmp_path: Path, seed: int) -> None:
    """From at most .4 to at least .75 on held-out prompts; p99 at least 5 × the median
    throughout.
    """
    command = [sys.executable, "-m", "rollstream", "run", str(QUICKSTART)]
    done = subprocess.run(
        [*command, "--run", str(tmp_path / "run"), "--seed", str(seed)],
        capture_output=True,
        text=True,
        timeout=3600,  # ends a hang; a slow and busy machine takes a third of it
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = {line["step"]: line for line in read_metrics(tmp_path / "run/metrics/eval.jsonl")}
    assert lines[0]["accuracy_sampled"] <= 0.4
    assert lines[60]["accuracy_sampled"] >= 0.75
    assert all(line["length_p99"] >= 5 * line["length_median"] for line in lines.values())
    assert (tmp_path / "run/report.html").exists()
