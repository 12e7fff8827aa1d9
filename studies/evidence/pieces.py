"""One run of the evidence (`run_piece`): trains an arm under a seed until its number of trained
tokens, evaluates the version that they made, and writes the row with its facts.

Warm models and most logs stay in a scratch folder; a run that is interrupted begins again.
"""

import fcntl
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch

from rollstream.producers.rollout.evaluation import Evaluation
from rollstream.producers.tasks.registry import load_task
from rollstream.revision import code_revision
from rollstream.run.config.config import load
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import prompt_tokens_max
from rollstream.run.warmup.warmup import SftSchedule, warm_up
from studies.evidence.arms import ARMS, COMMON, MADE, Arm, World
from studies.evidence.generation import Group
from studies.evidence.log import LOGGED_SEED, logged_path, read_log, write_log
from studies.evidence.rows import FACTS, RUNS, EvidenceRow, row_path, write_row
from studies.evidence.stepped_run import SteppedRun, TrainedStep

WARM_SEED = 0
STEP_METRICS = (
    "tokens_trained", "reward_mean", "accuracy", "loss", "entropy", "kl", "ess", "clipped",
    "ratio_max", "gradient_norm", "lag_consumed_mean", "lag_consumed_max", "length_median",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """A run to be made: a world, an arm, a seed."""

    world: World
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        return f"{self.world.name} {self.arm.name} seed {self.seed}"

    @property
    def has_log(self) -> bool:
        """Whether its trajectories are committed, with its row."""
        return self.seed == LOGGED_SEED and not self.arm.recorded and self.arm in MADE

    def is_done(self, root: Path = RUNS) -> bool:
        row = row_path(self.world.name, self.arm.name, self.seed, root)
        is_logged = not self.has_log or logged_path(self.world.name, self.arm.name, root).exists()
        return row.exists() and is_logged

    def settings(self) -> list[str]:
        """The settings besides those of the configuration, without the warm model."""
        lag = f"dispatch.max_lag={2 * self.arm.schedule.lag}"  # a bound that masks no token
        return [*COMMON, *self.world.settings, lag, *self.arm.settings, f"seed={self.seed}"]


def run_piece(piece: Piece, scratch: Path, report: Callable[[str], None]) -> Path:
    """Make the run, its log where one is kept, and its row; returns the row's path."""
    began_s = time.process_time()
    made = made_run(piece, scratch, report)
    accuracy = made.row.accuracy
    report(f"{piece.name}: {accuracy:.4f} after {time.process_time() - began_s:.0f} s of CPU")
    if piece.has_log or any(arm.recorded == piece.arm.name for arm in ARMS.values()):
        write_log(log_path(piece, scratch), [step.groups for step in made.steps])
    facts = [fact for step in made.steps for fact in step.facts]
    return write_row(made.row, pa.Table.from_pylist(facts, schema=FACTS))


@dataclass(frozen=True, slots=True)
class MadeRun:
    """A run's row and its steps."""

    row: EvidenceRow
    steps: Sequence[TrainedStep]


def made_run(piece: Piece, scratch: Path, report: Callable[[str], None]) -> MadeRun:
    """Make the run; nothing of it is written."""
    c = configuration_of(piece, scratch)
    report(f"{piece.name}: begins")
    recorded = _recorded(piece, c, scratch, report) if piece.arm.recorded else ()
    began_s = time.process_time()
    run = SteppedRun(c, scratch, piece.arm.schedule, recorded)
    steps = list(run.train(piece.world.tokens))
    seconds = time.process_time() - began_s
    held_out = run.evaluate(piece.world.prompts, piece.arm.samples)
    row = row_of(piece, steps, held_out, run.learner.state_hash(), seconds)
    run.learner.close()
    return MadeRun(row, steps)


def replayed_hash(piece: Piece, scratch: Path) -> str:
    """Train the committed log of the arm again, without generation; returns the hash of the state
    that it ends with.
    """
    c = configuration_of(piece, scratch)
    path = logged_path(piece.world.name, piece.arm.name)
    log = read_log(path, c.trainer.groups_per_step)
    run = SteppedRun(c, scratch, piece.arm.schedule, log)
    for _ in run.train(piece.world.tokens):
        pass
    found = run.learner.state_hash()
    run.learner.close()
    return found


def configuration_of(piece: Piece, scratch: Path) -> Configuration:
    """Returns the run's configuration, whose warm model is there."""
    warm = warm_model(piece, scratch)
    return load(piece.world.configuration, [*piece.settings(), f"model.path={warm}"])


def warm_model(piece: Piece, scratch: Path) -> Path:
    """Returns the warm model of the world, made once for all seeds; processes wait for it."""
    folder = scratch / piece.world.name / f"warm-{WARM_SEED}" / "model"
    c = load(piece.world.configuration, [*piece.world.settings, f"seed={WARM_SEED}"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    schedule = SftSchedule(documents=c.warmup.documents, steps=c.warmup.steps)
    task = load_task(c.task, prompt_tokens_max(c))
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        warm_up(task, c.model, c.seed, folder, 1, schedule=schedule)
    return folder


def log_path(piece: Piece, scratch: Path) -> Path:
    """Returns the path of the piece's log: among the committed ones, or in the scratch folder."""
    if piece.has_log:
        return logged_path(piece.world.name, piece.arm.name)
    return scratch / piece.world.name / f"log-{piece.arm.name}-{piece.seed}.parquet"


def _recorded(
    piece: Piece, c: Configuration, scratch: Path, report: Callable[[str], None]
) -> Sequence[Sequence[Group]]:
    """Returns the groups of the steps of the arm whose trajectories this one trains; makes that run
    if its log is not at hand.
    """
    source = Piece(piece.world, ARMS[piece.arm.recorded], piece.seed)
    path = log_path(source, scratch)
    if not path.exists():
        write_log(path, [step.groups for step in made_run(source, scratch, report).steps])
    return read_log(path, c.trainer.groups_per_step)


def row_of(
    piece: Piece,
    steps: Sequence[TrainedStep],
    held_out: Evaluation,
    state_hash: str,
    seconds: float,
) -> EvidenceRow:
    """Returns the row of a run, without the hash of its facts."""
    return EvidenceRow(
        world=piece.world.name,
        arm=piece.arm.name,
        seed=piece.seed,
        settings=tuple(piece.settings()),
        tokens_wanted=piece.world.tokens,
        step=steps[-1].step,
        tokens=sum(step.tokens for step in steps),
        accuracy=round(held_out.accuracy_sampled, 6),
        accuracy_greedy=round(held_out.accuracy_greedy, 6),
        prompts=held_out.prompts,
        by_prompt=tuple((right, n, round(mean, 6)) for right, n, mean in held_out.by_prompt),
        steps={name: [_rounded(step.metrics.get(name)) for step in steps] for name in STEP_METRICS},
        state_hash=state_hash,
        facts="",
        seconds=round(seconds, 1),
        code_revision=code_revision(),
        machine=machine(),
    )


def machine() -> dict[str, str]:
    """What a row records of the machine: other kinds may round differently."""
    return {
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "cpu": platform.machine(),
        "cores": str(os.cpu_count()),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
