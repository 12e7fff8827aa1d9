"""One run of `examples/longtail-model.toml` and its measurement from the log: speed, time to a
reward of .75, the lengths of the answers, and what repack, placement and drafts did.

The window begins with the end of the second pass over the prompts and ends with the example's last
step. From the first pass on the lengths are known; in the second what was generated ahead while
the trainer's process started is used up. The run itself has `EXTRA` steps more and is ended after
the window, so that the window contains no final drain.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.runs.measured import measure
from benchmarks.runs.watched import Slots, Watched, slots_of, watched
from rollstream.look.monitor.state import MOVES_FILE, parse_moves
from rollstream.run.config.config import load
from rollstream.run.config.settings import Configuration
from rollstream.storage.metrics_file import read_metrics
from rollstream.streams.records import Assignment, Partial, RolloutStatus, StepDone, Trajectory
from testbed.repository import EXAMPLES
from testbed.run_process import read

EXAMPLE = EXAMPLES / "longtail-model.toml"
EXTRA = 6
PATIENT = (
    "evaluation.enabled=false", "dispatch.heartbeat_timeout_s=60", "dispatch.group_deadline_s=3600",
    "task.reward_timeout_s=60",
)  # fmt: skip
"""No evaluation; and a machine that other programs keep busy kills nothing."""
REWARD, SMOOTHED = 0.75, 4  # the mean reward of so many consecutive steps


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafted tokens, those accepted, and the tokens and passes of the answers with drafts."""

    guessed: int
    accepted: int
    tokens: int
    passes: int


@dataclass(frozen=True, slots=True)
class Moved:
    """Repack moves, the requests that resumed elsewhere, and the tokens prefilled again there."""

    moves: int
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ArmResult:
    """What one run measured. All but `to_75_s` is of the window."""

    tokens_per_s: float
    """Trained tokens per second."""
    to_75_s: float | None
    """Seconds from the first admission to the first `SMOOTHED` steps with a mean reward of
    `REWARD`; None: it was not reached.
    """
    reward: float
    """Mean of the last `SMOOTHED` steps."""
    length_median: float
    length_p99: float
    length_max: int
    forced: float
    """Share of the answers that ended at the limit of their length."""
    batch: float
    """Rows of a rollout while it decodes, mean over time."""
    decode_us: float
    """Processor time of the rollouts' engines per generated token, in microseconds."""
    train_us: float
    """Processor time of forward and backward passes per trained token, in microseconds."""
    slots: Slots
    moved: Moved
    drafted: Drafted

    @property
    def processor_us(self) -> float:
        """Processor time of generating and training a token. Unlike `tokens_per_s` it does not
        count how long other programs kept the cores.
        """
        return self.decode_us + self.train_us


def run_arm(folder: Path, settings: Sequence[str]) -> ArmResult:
    """Runs the example with these settings until its window has ended, and removes its folder."""
    c = load(EXAMPLE, settings, {})
    first, last = 2 * pass_steps(c), c.trainer.steps
    more = f"trainer.steps={last + EXTRA}"
    with watched(folder, [*settings, *PATIENT, more], EXAMPLE) as run:
        for step in range(1, last + 1):  # on a busy machine the whole run outlasts one wait
            run.wait_for(lambda wanted=step: wanted in run.steps)
        run.rest(1.0)  # a heartbeat after the last step's end
    found = _measured(run, first, last)
    shutil.rmtree(folder)
    return found


def pass_steps(c: Configuration) -> int:
    """Returns the number of steps of one pass over the prompts."""
    return int(str(c.task.options["prompts"])) // c.trainer.groups_per_step


def _measured(run: Watched, first: int, last: int) -> ArmResult:
    begin_s, end_s = run.steps[first].time_s, run.steps[last].time_s
    steps = [run.steps[number] for number in sorted(run.steps) if number <= last]
    trained = sum(step.metrics["tokens_trained"] for step in steps[first:])
    answers = [
        answer
        for answer in read(run.folder, "trajectories", Trajectory)
        if answer.finish != "dead" and begin_s <= answer.finished_s <= end_s
    ]
    lengths = np.array([len(answer.logprobs) for answer in answers])
    rewards = [step.metrics["reward_mean"] for step in steps]
    decode_s, made, rows = _decoding(list(run.beats.values()), begin_s, end_s)
    return ArmResult(
        tokens_per_s=trained / (end_s - begin_s),
        to_75_s=time_to_reward(steps, measure(run.folder).started_s),
        reward=float(np.mean(rewards[-SMOOTHED:])),
        length_median=float(np.median(lengths)),
        length_p99=float(np.quantile(lengths, 0.99)),
        length_max=int(lengths.max()),
        forced=float(np.mean([answer.finish == "length" for answer in answers])),
        batch=rows,
        decode_us=1e6 * decode_s / made,
        train_us=1e6 * sum(step.metrics["busy_s"] for step in steps[first:]) / trained,
        slots=slots_of(run, begin_s, end_s),
        moved=_moved(run.folder, begin_s, end_s),
        drafted=drafts_of(answers),
    )


def time_to_reward(steps: Sequence[StepDone], started_s: float) -> float | None:
    """Returns the seconds from `started_s` to the end of the first `SMOOTHED` consecutive steps
    whose mean reward is `REWARD` or more; None if there are none.
    """
    for end in range(SMOOTHED, len(steps) + 1):
        newest = steps[end - SMOOTHED : end]
        if np.mean([step.metrics["reward_mean"] for step in newest]) >= REWARD:
            return newest[-1].time_s - started_s
    return None


def _decoding(
    rollouts: Sequence[Sequence[RolloutStatus]], begin_s: float, end_s: float
) -> tuple[float, int, float]:
    """Returns processor seconds and generated tokens of all rollouts in the window, and their rows
    while they had any, by the time between heartbeats.
    """
    busy_s, tokens, row_seconds, seconds = 0.0, 0, 0.0, 0.0
    for beats in rollouts:
        inside = [beat for beat in beats if begin_s <= beat.time_s <= end_s]
        for beat, after in pairwise(inside):
            if after.term != beat.term:
                continue
            busy_s += after.busy_s - beat.busy_s
            tokens += after.tokens_total - beat.tokens_total
            lasts_s = (after.time_s - beat.time_s) if beat.running else 0.0
            row_seconds, seconds = row_seconds + lasts_s * beat.running, seconds + lasts_s
    return busy_s, max(1, tokens), row_seconds / max(1e-9, seconds)


def _moved(folder: Path, begin_s: float, end_s: float) -> Moved:
    moves = [
        move
        for move in parse_moves(read_metrics(folder / "metrics" / MOVES_FILE))
        if begin_s <= move.time_s <= end_s
    ]
    assignments, partials = (
        read(folder, "assignments", Assignment),
        read(folder, "partials", Partial),
    )
    requests, tokens = refilled(assignments, partials)
    return Moved(len(moves), requests, tokens)


def refilled(assignments: Sequence[Assignment], partials: Sequence[Partial]) -> tuple[int, int]:
    """Returns the number of resumes after a release to another rollout, and their tokens, which
    are prefilled there again.
    """
    onward = {(a.trajectory, a.attempt) for a in assignments if a.kind == "release" and a.onward}
    resumed = {(a.trajectory, a.attempt - 1) for a in assignments if a.kind == "resume"}
    given_up = [
        partial
        for partial in partials
        if partial.last and (partial.trajectory, partial.attempt) in onward & resumed
    ]
    return len(given_up), sum(partial.start + len(partial.tokens) for partial in given_up)


def drafts_of(answers: Sequence[Trajectory]) -> Drafted:
    """Returns the sums over the answers with draft statistics."""
    found = [(answer, answer.drafts) for answer in answers if answer.drafts is not None]
    return Drafted(
        guessed=sum(drafts.guessed for _, drafts in found),
        accepted=sum(sum(drafts.runs[1::2]) for _, drafts in found),
        tokens=sum(len(answer.logprobs) for answer, _ in found),
        passes=sum(drafts.steps for _, drafts in found),
    )
