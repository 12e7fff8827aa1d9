"""A short run of `examples/epochs.toml` with vLLM: five passes over eight prompts, drafts on."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.repository import EXAMPLES
from testbed.waiting import WAIT_S

pytestmark = pytest.mark.long
EXAMPLE = EXAMPLES / "epochs.toml"
SMALL = {
    "model.config.num_hidden_layers": 1,
    "warmup.documents": 500,
    "warmup.steps": 40,
    "sampling.temperature": 0.01,  # it knows little, and repeats it
    "sampling.tokens_max": 48,
    "rollouts.engine": "vllm",
    "rollouts.count": 1,
    "rollouts.context_max": 128,
    "trainer.steps": 10,
    "trainer.groups_per_step": 4,
    "trainer.samples_per_group": 4,
    "evaluation.enabled": "false",
}


def rollstream(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollstream", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_a_run_with_drafts_on_vllm_accepts_some_and_keeps_the_invariants(tmp_path: Path) -> None:
    """vLLM's core is a process of its own, weights change in flight, one node's history."""
    example, folder = tmp_path / "epochs.toml", tmp_path / "run"
    text = EXAMPLE.read_text(encoding="utf-8")
    example.write_text(text.replace("{ prompts = 192 }", "{ prompts = 8 }"), encoding="utf-8")
    changed = [f for key, value in SMALL.items() for f in ("--set", f"{key}={value}")]
    ran = rollstream("run", str(example), "--run", str(folder), *changed)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    audited = rollstream("audit", str(folder))
    assert audited.returncode == 0, audited.stdout
    output = (folder / "logs" / "rollout-0.log").read_text(encoding="utf-8")
    found = re.search(r"drafts: (\d+) answers .* (\d+) of (\d+) draft tokens accepted", output)
    assert found is not None, output
    answers, right, guessed = map(int, found.groups())
    assert answers > 80
    assert 0 < right <= guessed
    asked = rollstream("query", "FROM drafts", "--run", str(folder), "--json")
    rows = [json.loads(line) for line in asked.stdout.splitlines()]
    assert {row["pass"] for row in rows} >= {1, 2, 3, 4, 5}
    reported = {key: sum(row[key] for row in rows) for key in ("accepted", "guessed", "asked")}
    assert 0 < reported["accepted"] <= right, "what was under way at the end is in no trajectory"
    assert reported["accepted"] <= reported["guessed"] <= guessed
    assert reported["asked"] > 0
    best = max(rows, key=lambda row: row["accepted"])
    shown = rollstream("inspect", best["trajectory"], str(folder)).stdout
    assert f"{best['accepted']} of {best['guessed']} draft tokens accepted" in shown
