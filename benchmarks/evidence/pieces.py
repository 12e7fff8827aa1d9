"""One run of the evidence (`run_piece`): trains an arm under a seed until its number of trained
tokens, evaluates the version that they made, and writes the row with its facts.

Warm models and recorded trajectories stay in a scratch folder; a run that is interrupted begins
again.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
import torch

from benchmarks.evidence.arms import ARMS, COMMON, Arm, World
from benchmarks.evidence.generation import Group
from benchmarks.evidence.rows import FACTS, RUNS, EvidenceRow, row_path, write_row
from benchmarks.evidence.stepped_run import SteppedRun, TrainedStep
from rollstream.config.config import load
from rollstream.producers.evaluation import Evaluation
from rollstream.producers.tasks.registry import load_task
from rollstream.revision import code_revision
from rollstream.roles.context import prompt_tokens_max
from rollstream.streams.codec import decode, encode
from rollstream.streams.records import Trajectory
from rollstream.warmup.warmup import SftSchedule, warm_up

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

    def is_done(self, root: Path = RUNS) -> bool:
        return row_path(self.world.name, self.arm.name, self.seed, root).exists()

    def settings(self) -> list[str]:
        """The settings besides those of the configuration, without the warm model."""
        lag = f"dispatch.max_lag={2 * self.arm.schedule.lag}"  # a bound that masks no token
        return [*COMMON, *self.world.settings, lag, *self.arm.settings, f"seed={self.seed}"]


def run_piece(piece: Piece, scratch: Path, report: Callable[[str], None]) -> Path:
    """Make the run and its row; returns the row's path."""
    began_s = time.process_time()
    row, facts = made_row(piece, scratch, report)
    report(f"{piece.name}: {row.accuracy:.4f} after {time.process_time() - began_s:.0f} s of CPU")
    return write_row(row, facts)


def made_row(
    piece: Piece, scratch: Path, report: Callable[[str], None]
) -> tuple[EvidenceRow, pa.Table]:
    """Make the run; returns its row and the facts of its trajectories, written nowhere."""
    warm = warm_model(piece, scratch)
    report(f"{piece.name}: begins")
    configuration = load(piece.world.configuration, [*piece.settings(), f"model.path={warm}"])
    recorded = _recorded(piece, scratch, report) if piece.arm.recorded else ()
    began_s = time.process_time()
    run = SteppedRun(configuration, scratch, piece.arm.schedule, recorded)
    steps = list(run.train(piece.world.tokens))
    seconds = time.process_time() - began_s
    if any(arm.recorded == piece.arm.name for arm in ARMS.values()):
        write_recorded(_record_path(piece, scratch), steps)
    held_out = run.evaluate(piece.world.prompts, piece.arm.samples)
    row = row_of(piece, steps, held_out, run.learner.state_hash(), seconds)
    run.learner.close()
    facts = [fact for step in steps for fact in step.facts]
    return row, pa.Table.from_pylist(facts, schema=FACTS)


def warm_model(piece: Piece, scratch: Path) -> Path:
    """The warm model of the world, made once for all seeds."""
    folder = scratch / piece.world.name / f"warm-{WARM_SEED}" / "model"
    c = load(piece.world.configuration, [*piece.world.settings, f"seed={WARM_SEED}"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    schedule = SftSchedule(documents=c.warmup.documents, steps=c.warmup.steps)
    task = load_task(c.task, prompt_tokens_max(c))
    warm_up(task, c.model, c.seed, folder, 1, schedule=schedule)
    return folder


def _record_path(piece: Piece, scratch: Path) -> Path:
    name = piece.arm.recorded or piece.arm.name
    return scratch / piece.world.name / f"recorded-{name}-{piece.seed}.msgpack"


def write_recorded(path: Path, steps: Sequence[TrainedStep]) -> None:
    """Write the steps' groups, as encoded records."""
    found = [[[encode(one) for one in group] for group in step.groups] for step in steps]
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.msgpack.encode(found))
    partial.replace(path)


def _recorded(
    piece: Piece, scratch: Path, report: Callable[[str], None]
) -> Sequence[Sequence[Group]]:
    """Returns the groups of the steps of the arm whose trajectories this one trains; makes that run
    if its trajectories are not at hand.
    """
    path = _record_path(piece, scratch)
    if not path.exists():
        made_row(Piece(piece.world, ARMS[piece.arm.recorded], piece.seed), scratch, report)
    return read_recorded(path)


def read_recorded(path: Path) -> list[list[Group]]:
    """Returns the groups of each step that `write_recorded` wrote."""
    steps = msgspec.msgpack.decode(path.read_bytes(), type=list[list[list[bytes]]])
    return [[list(_decoded(group)) for group in step] for step in steps]


def _decoded(group: Sequence[bytes]) -> Iterator[Trajectory]:
    for data in group:
        record = decode(data).record
        assert isinstance(record, Trajectory), "written by write_recorded"
        yield record


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
