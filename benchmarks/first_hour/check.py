"""`check_s`: the longest `rollstream check` of all examples, from the start of its process to its
end; `check_million_s`: that of a data set of a million rows. `planted_row_named`: 1 if a bad row
among a million is named, with its file and line, before step 1 is done.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, alone
from rollstream.storage.metrics_file import read_metrics
from testbed.repository import ROOT

ROWS, BAD = 1_000_000, 777_777
NO_RUNS = {"cluster-1024.toml"}  # of examples: a simulation
RUN = """
run = "million"
[model.config]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
max_position_embeddings = 64
[task]
name = "dataset"
[task.options]
path = "rows.jsonl"
answer = "reference"
verifier = "checks:right"
[warmup]
documents = 100
steps = 2
[sampling]
tokens_max = 4
[rollouts]
count = 1
[evaluation]
enabled = false
[trainer]
steps = 1
groups_per_step = 2
samples_per_group = 2
workers = 1
"""


def cases(quick: bool) -> Iterator[Case]:
    """Yields the times; the quick form leaves out the run over a million rows."""
    names = sorted(path.name for path in (ROOT / "examples").glob("*.toml"))
    seconds = {name: _check(f"examples/{name}", ROOT) for name in names if name not in NO_RUNS}
    slowest = max(seconds, key=lambda name: seconds[name])
    note = f"{len(seconds)} examples, the slowest {slowest}"
    yield alone("check_s", seconds[slowest], "s", at_most=5.0, note=note)
    with tempfile.TemporaryDirectory(prefix="rollstream-million-") as name:
        folder = Path(name)
        write_million(folder)
        size = (folder / "rows.jsonl").stat().st_size / 1e6
        note = f"{ROWS:,} rows, {size:.0f} MB, one of them bad"
        yield alone("check_million_s", _check("run.toml", folder), "s", at_most=5.0, note=note)
        if not quick:
            yield _planted(folder)


def write_million(folder: Path) -> None:
    """Write a run whose data set has a million rows, one of which is no JSON."""
    (folder / "run.toml").write_text(RUN)
    (folder / "checks.py").write_text("def right(answer, reference): return 0.5\n")
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(1, ROWS + 1):
            text = f"{number} plus {number % 97}?"
            row = {"prompt": text, "reference": str(number), "note": "x" * 20}
            file.write((json.dumps(row) if number != BAD else '{"prompt": "') + "\n")


def _words(*words: str) -> list[str]:
    return [sys.executable, "-m", "rollstream", *words]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _check(configuration: str, folder: Path) -> float:
    begun = time.monotonic()
    words = _words("check", configuration, "--json")
    done = subprocess.run(
        words, cwd=folder, env=_environment(), capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - begun
    if done.returncode not in (0, 2):
        raise RuntimeError(f"{configuration}: exit code {done.returncode}: {done.stderr[-500:]}")
    return seconds


def _planted(folder: Path) -> Case:
    """Train one step over the million rows; returns whether the bad one was named before."""
    words = _words("run", "run.toml", "--json")
    done = subprocess.run(
        words, cwd=folder, env=_environment(), capture_output=True, text=True, check=False
    )
    metrics = folder / "runs" / "million" / "metrics"
    named = [line for line in read_metrics(metrics / "prompts.jsonl") if line.get("skipped_rows")]
    steps = [line for line in read_metrics(metrics / "trainer.jsonl") if line.get("step") == 1]
    if done.returncode or not named or not steps:
        note = f"exit code {done.returncode}: {done.stderr[-300:]}"
        return alone("planted_row_named", 0.0, "of 1", at_least=1.0, note=note)
    places = named[0]["skipped_rows"][0]["named"]
    is_named = any(f"rows.jsonl, line {BAD}:" in place for place in places)
    ahead = steps[0]["time_s"] - named[0]["time_s"]
    value = float(is_named and ahead > 0)
    note = f"{ahead:.1f} s before the end of step 1: {places[0]}"
    return alone("planted_row_named", value, "of 1", at_least=1.0, note=note)
