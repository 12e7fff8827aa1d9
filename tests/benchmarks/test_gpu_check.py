"""`make gpu-check` without a GPU, and its metrics from records; its whole dry run is among vLLM's
tests.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_check.__main__ import Check, report
from benchmarks.gpu_check.read import Seen
from benchmarks.gpu_check.setup import DRY, TINY, configuration, make_model
from rollstream.config.config import load
from testbed.repository import ROOT
from tests.support.planted_states import SAMPLES, done, finished


def test_without_a_gpu_one_sentence_and_status_2():
    line = [sys.executable, "-m", "benchmarks.gpu_check"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(line, cwd=ROOT, env=hidden, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("There is no GPU here")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("is_random", [True, False])
def test_its_configuration_is_coherent(tmp_path: Path, is_random: bool):
    model = make_model(TINY, tmp_path / "model")
    toml = tmp_path / "check.toml"
    toml.write_text(configuration(DRY, model, tmp_path, 0.4, is_random=is_random))
    c = load(toml, (), {})
    assert (c.rollouts.vllm.memory_share, c.trainer.compute) == (0.4, "bfloat16")
    assert c.task.name == ("numbered" if is_random else "dataset")


def test_its_lines_say_what_is_unknown(tmp_path: Path):
    model = make_model(TINY, tmp_path / "model")
    check = Check(DRY, model, tmp_path, 0.4, is_random=False)
    answers = tuple(finished(0, index, 1.0) for index in range(SAMPLES))
    compared = {"mismatch_tokens": 50.0, "mismatch_kl": 2e-4, "mismatch_mean": 0.01}
    steps = tuple(done(step, **compared) for step in range(1, 5))
    lines = report(check, Seen(steps, answers, 900.0, 800.0, (0.5, 0.02, 0.04)), 1000.0)
    text = "\n".join(lines)
    assert "900 tokens/s (0.90 of bare vLLM) before" in text
    assert "MFU unknown" in text
    assert "30 ms (longest 40), 3 versions taken" in text
    assert "KL 2.00e-04, mean 1.00e-02 nats (200 tokens)" in text
    assert "reward        0.50 0.50 0.50 0.50" in text
    nothing = "\n".join(report(check, Seen((), answers, None, None, ()), None))
    assert "no update" in nothing
    assert "no token of lag 0" in nothing
