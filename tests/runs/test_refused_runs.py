"""A run whose model no rollout can serve ends at once with the reason; one whose rollout merely
died continues.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.storage.metrics_file import read_metrics
from rollstream.storage.models import build_model
from testbed.run_process import (
    SIZES,
    STEPS,
    assert_the_log_adds_up,
    role,
    role_restarted,
    started,
    steps_done,
)
from testbed.waiting import WAIT_S, wait_for


@pytest.fixture(scope="module")
def unserved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the trainer takes; its rope depends on the batch, so none of our engines
    does.
    """
    from rollstream.producers.settings import TaskSettings
    from rollstream.producers.tasks.registry import load_task

    folder = tmp_path_factory.mktemp("unserved")
    tokenizer = load_task(TaskSettings()).tokenizer()
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    sizes = SIZES | {"vocab_size": tokenizer.size, "rope_parameters": rope}
    model = build_model("Qwen3ForCausalLM", sizes | dict(tokenizer.special), seed=0)
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "rollstream", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S, check=False)


def deaths_of_rollouts(folder: Path) -> list[int]:
    events = read_metrics(folder / "metrics" / "supervisor.jsonl")
    return [one["code"] for one in events if one["event"] == "death" and "rollout" in one["role"]]


@pytest.mark.slow
def test_a_refused_model_ends_the_run_with_the_rollouts_message(
    tmp_path: Path, unserved: Path
) -> None:
    """No role is restarted in vain, and the written records stay readable."""
    folder = tmp_path / "run"
    with started(folder, unserved, ["rollouts.count=1"]) as process:
        assert process.wait(WAIT_S) == 1
    last = (tmp_path / "output.txt").read_text().strip().splitlines()[-2:]
    assert last[0].startswith("rollstream: rollout-0 refused to start: engine 'torch' cannot serve")
    assert "rope type 'dynamic' depends on the batch" in last[0]
    assert "choose another model (model.path)" in last[0]
    assert last[1] == f"(its log: {folder / 'logs' / 'rollout-0.log'})"
    assert deaths_of_rollouts(folder) == [2]
    audit = run_command("audit", str(folder), "--json")
    assert audit.returncode == 0, audit.stderr
    assert json.loads(audit.stdout)["violations"] == 0
    assert run_command("tail", "ledger", str(folder), "--last", "1").stdout.strip()
    evaluated = run_command("eval", str(folder), "--versions", "0")
    assert evaluated.returncode == 2
    assert "depends on the batch; choose another model (model.path) or no ev" in evaluated.stderr


@pytest.mark.long
def test_a_killed_rollout_is_no_refusal(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "run"
    with started(folder, model, ["rollouts.count=1"]) as process:
        for steps in (0, 3):
            wait_for(lambda: role_restarted(process, "rollout-0", 0), process)  # the log exists
            wait_for(lambda: steps_done(folder) >= steps, process)  # noqa: B023
            victim = role(process, "rollout-0")
            victim.kill()
            wait_for(lambda: role_restarted(process, "rollout-0", victim.pid), process)  # noqa: B023
        assert process.wait(WAIT_S) == 0
    assert deaths_of_rollouts(folder) == [-9, -9]
    assert_the_log_adds_up(folder, STEPS)
