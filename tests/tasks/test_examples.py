"""Every configuration in `examples/` runs as written, here for a few steps."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollstream.storage.metrics_file import read_metrics
from testbed.repository import ROOT
from testbed.waiting import WAIT_S

RUN_S = 6 * WAIT_S  # a whole run with its warm-up, beside many other programs
SHORT = ["warmup.steps=2", "warmup.documents=40", "trainer.steps=2", "trainer.workers=1"]
MINE = ["reasoning-gym", "dataset", "mixture"]
UNTRAINED = [
    "trainer.groups_per_step=4", "task.options.prompts=8", "sampling.tokens_max=48",
    "evaluation.prompts=8", "rollouts.count=2",
]  # fmt: skip
"""For a long tail: answers of an untrained model do not end by themselves."""


def run(name: str, folder: Path, settings: list[str]) -> tuple[list[Any], list[Any]]:
    """Lines of the trainer's steps and of the evaluations."""
    line = [
        sys.executable,
        "-m",
        "rollstream",
        "run",
        f"examples/{name}.toml",
        "--run",
        str(folder),
    ]
    for setting in settings:
        line += ["--set", setting]
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    metrics = folder / "metrics"
    return list(read_metrics(metrics / "trainer.jsonl")), list(read_metrics(metrics / "eval.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("name", MINE)
def test_an_example_runs_for_a_few_steps(tmp_path: Path, name: str):
    steps, evaluations = run(name, tmp_path / "run", SHORT)
    assert len(steps) == 2
    assert [line["step"] for line in evaluations] == [0, 2]
    assert all(line["dead"] == 0 for line in evaluations)
    labels = {key for line in evaluations for key in line if key.startswith("accuracy_sampled/")}
    parts = tomllib.loads((ROOT / f"examples/{name}.toml").read_text())["task"].get("parts", [])
    assert len(labels) == len(parts)


@pytest.mark.slow
def test_the_long_tail_of_a_model_runs_for_a_few_steps(tmp_path: Path):
    steps, evaluations = run("longtail-model", tmp_path / "run", [*SHORT, *UNTRAINED])
    assert [line["step"] for line in steps] == [1, 2]
    assert [line["step"] for line in evaluations] == [0, 2]
    assert all(line["tokens_trained"] > 0 and line["dead_members"] == 0 for line in steps)


@pytest.mark.long
@pytest.mark.parametrize("name", [*MINE, "longtail-model"])
def test_an_example_learns(tmp_path: Path, name: str):
    _, evaluations = run(name, tmp_path / "run", [])
    first, last = evaluations[0]["accuracy_sampled"], evaluations[-1]["accuracy_sampled"]
    assert last >= first + 0.05


@pytest.mark.long
@pytest.mark.parametrize("body", ["own", "policy"])
def test_the_quickstart_learns_with_a_critic(tmp_path: Path, body: str):
    """The preset replaces the objective that the quickstart's file sets."""
    own = {"body": body, "lr": 1e-3, "warmup": 4, "gae_lambda": 0.95 if body == "own" else 1}
    critic = [f"trainer.critic.{name}={value}" for name, value in own.items()]
    settings = ["trainer.preset=ppo", *critic, "evaluation.enabled=false"]
    steps, _ = run("quickstart", tmp_path / "run", settings)
    rewards = [line["reward_mean"] for line in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
