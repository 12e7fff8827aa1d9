"""Settings and model of the runs of `examples/quickstart.toml` that several benchmarks start."""

import subprocess
import sys
from pathlib import Path

from testbed.repository import EXAMPLES

QUICKSTART = EXAMPLES / "quickstart.toml"
ASYNC = ["evaluation.enabled=false", "weights.keep_every=1", "weights.versions_max=80"]
"""Trains only; versions are kept, so that they can be evaluated afterwards."""


def warm_model(base: Path) -> Path:
    """The quickstart's warm model of seed 0, made once per benchmark."""
    folder = base / "warm"
    overrides = ["--run", str(folder), "--set", "trainer.steps=1"]
    command = [sys.executable, "-m", "rollstream", "run", str(QUICKSTART), *overrides]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    return folder / "model"
