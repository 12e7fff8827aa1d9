"""One run of the evidence (`run_piece`): trains an arm under a seed until its number of trained
tokens, evaluates the version that they made, and writes the row with its facts.

Warm models and unfinished runs stay in a scratch folder, so an interrupted piece continues: the
warm model of a seed is made once for all arms, and a run resumes from its log.
"""

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from benchmarks.evidence.arms import COMMON, Arm, World
from benchmarks.evidence.rows import RUNS, EvidenceRow, row_path, write_row
from benchmarks.runs.measured import evaluated
from rollstream.analysis.locate import locate_run
from rollstream.analysis.session import QuerySession
from rollstream.config.config import CODE_REVISION
from rollstream.storage.metrics_file import read_metrics
from testbed.run_process import kill_all, run_line

POLL_S = 0.5
TIMEOUT_S = 3600.0  # of a run; on two idle cores it takes a few minutes
STOP_S = 120.0
STEP_METRICS = (
    "tokens_trained", "reward_mean", "accuracy", "loss", "entropy", "kl", "ess", "clipped",
    "ratio_max", "gradient_norm", "lag_consumed_mean", "lag_consumed_max", "length_median",
)  # fmt: skip
_FACTS = """
WITH prompts AS (
    SELECT "group", any_value(hash(list_slice(tokens, 1, list_position(sources, 1) - 1))) AS prompt
    FROM completions WHERE finish != 'dead' GROUP BY "group"
), lags AS (
    SELECT trajectory, min(version) AS version,
           sum(lag_consumed * tokens) / sum(tokens) AS lag FROM spans GROUP BY trajectory
)
SELECT f."group", split_part(trajectory, '.', 2)::SMALLINT AS index, wave, prompt, fate, finish,
       tokens, tokens_trained, reward, step, version, lag
FROM fates f LEFT JOIN prompts USING ("group") LEFT JOIN lags USING (trajectory)
ORDER BY f."group", index
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run to be made: a world, an arm, a seed."""

    world: World
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.world.name} {self.arm.name} seed {self.seed}"

    def is_done(self, root: Path = RUNS) -> bool:
        return row_path(self.world.name, self.arm.name, self.seed, root).exists()

    def settings(self) -> list[str]:
        """The settings besides those of the configuration, without the warm model."""
        return [*COMMON, *self.world.settings, *self.arm.settings, f"seed={self.seed}"]


def run_piece(piece: Piece, scratch: Path, report: Callable[[str], None]) -> Path:
    """Make the run and its row; returns the row's path. Raises `RuntimeError`, with the end of its
    output, if the run ends before it has trained enough.
    """
    began = time.monotonic()
    warm = warm_model(piece, scratch)
    report(f"{piece.name}: warm model after {time.monotonic() - began:.0f} s")
    folder = scratch / piece.world.name / f"{piece.arm.name}-{piece.seed}"
    train(piece, folder, warm)
    report(f"{piece.name}: trained after {time.monotonic() - began:.0f} s")
    with QuerySession(locate_run(str(folder)), report) as session:
        steps = read_steps(session, piece.world.tokens)
        facts: pa.Table = session.arrow(_FACTS, lambda relation: relation.to_arrow_table())
        revision = str(session.location.configuration.get(CODE_REVISION))
    step = int(steps["step"][-1])
    held_out = evaluated(folder, [step], piece.world.samples)[step]
    row = _row(piece, steps, held_out, revision)
    return write_row(row, facts)


def warm_model(piece: Piece, scratch: Path) -> Path:
    """The warm model of the world and seed, made once."""
    folder = scratch / piece.world.name / f"warm-{piece.seed}"
    done = folder / "model" / "warmup.json"
    if not done.exists():
        settings = [*piece.world.settings, f"seed={piece.seed}", "trainer.steps=1"]
        settings += ["evaluation.enabled=false"]
        command = run_line(piece.world.configuration, folder, settings)
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
    return folder / "model"


def train(piece: Piece, folder: Path, warm: Path) -> None:
    """Run until `World.tokens` tokens are trained, then interrupt the run, which stops cleanly."""
    if trained_tokens(folder) >= piece.world.tokens:
        return
    settings = [*piece.settings(), f"model.path={warm}"]
    command = run_line(piece.world.configuration, folder, settings)
    output = folder.with_suffix(".out")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while trained_tokens(folder) < piece.world.tokens:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = output.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{piece.name} ended before its tokens were trained:\n{tail}")
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        finally:
            kill_all(process)


def trained_tokens(folder: Path) -> int:
    """Trained tokens of all finished steps."""
    path = folder / "metrics" / "trainer.jsonl"
    lines = read_metrics(path) if path.exists() else []
    by_step = {line["step"]: line["tokens_trained"] for line in lines}
    return int(sum(by_step.values()))


def read_steps(session: QuerySession, tokens_wanted: int) -> dict[str, list[Any]]:
    """The metrics of the steps up to the first behind which `tokens_wanted` tokens are trained."""
    columns = ("step", "state_hash", *STEP_METRICS, "seconds")
    answer = session.answer(f"SELECT {', '.join(columns)} FROM steps ORDER BY step")
    rows = [row for rows in answer.batches for row in rows]
    total, kept = 0.0, 0
    while total < tokens_wanted:
        total += rows[kept][2]
        kept += 1
    return {name: [row[at] for row in rows[:kept]] for at, name in enumerate(columns)}


def _row(
    piece: Piece, steps: Mapping[str, list[Any]], held_out: Mapping[str, Any], revision: str
) -> EvidenceRow:
    metrics = {name: [_rounded(value) for value in steps[name]] for name in STEP_METRICS}
    return EvidenceRow(
        world=piece.world.name,
        arm=piece.arm.name,
        seed=piece.seed,
        settings=tuple(piece.settings()),
        tokens_wanted=piece.world.tokens,
        step=int(steps["step"][-1]),
        tokens=int(sum(steps["tokens_trained"])),
        accuracy=held_out["accuracy_sampled"],
        accuracy_greedy=held_out["accuracy_greedy"],
        prompts=held_out["prompts"],
        by_prompt=tuple((right, count, mean) for right, count, mean in held_out["by_prompt"]),
        steps=metrics,
        state_hash=str(steps["state_hash"][-1]),
        facts="",
        seconds=round(sum(steps["seconds"]), 1),
        code_revision=revision,
        machine={
            "python": sys.version.split()[0],
            "torch": str(torch.__version__),
            "cpu": platform.machine(),
            "cores": str(os.cpu_count()),
        },
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
