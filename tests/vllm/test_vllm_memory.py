"""Memory of a rollout with two vLLM workers while it takes a version: none of them copies it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sizes.rank_memory import RankShape, write_model
from benchmarks.sizes.rollout_memory import VLLM, write
from testbed.repository import ROOT

pytestmark = pytest.mark.slow
SHAPE = RankShape(layers=24, hidden=768, intermediate=2048, vocabulary=4096)
SIZE = 308e6
"""Bytes of the version in bf16."""


def test_taking_a_version_needs_less_memory_than_half_of_it(tmp_path: Path) -> None:
    """In shared memory it would take all of it, and in the rollout as much again."""
    assert sum(write_model(SHAPE.config(), tmp_path / "model").values()) * 2 > SIZE
    write(tmp_path)
    line = [sys.executable, "-m", "benchmarks.sizes.rollout_memory", "apply", str(tmp_path), VLLM]
    limits = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    environment = {**os.environ, **limits, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        line, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    assert max(found["delta"], found["full"]) < SIZE / 2, found
