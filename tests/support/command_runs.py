"""Commands as a user types them, on runs of the quickstart that the environment makes small: 60
steps of one short group.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from testbed.repository import ROOT
from testbed.waiting import WAIT_S

PROGRAM = [sys.executable, "-m", "rollstream"]
SMALL = {
    "TRAINER__STEPS": "60", "TRAINER__GROUPS_PER_STEP": "1", "TRAINER__SAMPLES_PER_GROUP": "2",
    "TRAINER__WORKERS": "1", "SAMPLING__TOKENS_MAX": "8", "ROLLOUTS__COUNT": "1",
    "ROLLOUTS__SLOTS": "8", "WARMUP__STEPS": "2", "WARMUP__DOCUMENTS": "100",
    "EVALUATION__PROMPTS": "2", "EVALUATION__SAMPLES": "1", "EVALUATION__EVERY": "60",
    "CHECKPOINTS__EVERY": "30",
}  # fmt: skip


def make_runs(folder: Path, command: Sequence[str], names: Sequence[str]) -> None:
    """Execute this `run` command in a folder that has `examples/`, and copy its run to these
    names.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    done = run_command(command, folder)
    assert done.returncode == 0, done.stderr
    (made,) = (folder / "runs").iterdir()
    for name in names:
        if name != made.name:
            shutil.copytree(made, folder / "runs" / name)


def small_environment(**more: str) -> dict[str, str]:
    small = {f"ROLLSTREAM_{key}": value for key, value in SMALL.items()}
    return {**os.environ, **small, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def run_command(
    words: Sequence[str], folder: Path, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *words],
        cwd=folder,
        env=small_environment(**more),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=WAIT_S,
    )
