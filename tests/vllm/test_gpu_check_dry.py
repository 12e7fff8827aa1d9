"""`make gpu-check` without a GPU: a real run and bare vLLM, tiny."""

import json
import subprocess
import sys

import pytest

from testbed.repository import ROOT
from testbed.waiting import WAIT_S

pytestmark = pytest.mark.long


def measured(piece: str) -> list[str]:
    line = [sys.executable, "-m", "studies.gpu_check", "--cpu-dry-run", "--only", piece]
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_pause_of_each_form_of_a_version_is_measured() -> None:
    kinds = [line.split()[3] for line in measured("updates-vllm")]
    assert kinds == ["whole:", "delta:", "adapter:"]


def test_the_whole_run_works_apart_from_the_device() -> None:
    lines = {text.split()[0]: text for text in measured("run")}
    assert "4 of 4" in lines["steps"]
    for name in ("bare", "rollout", "trainer"):
        assert "tokens/s" in lines[name]
    assert "versions taken" in lines["update"]
    assert "mismatch" in lines
