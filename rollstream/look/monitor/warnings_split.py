"""Warns if GPUs are split badly between rollouts and trainer, by arithmetic: each side is as fast
as its number of GPUs, the slower one decides, and the log shows how long each is idle.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from statistics import fmean

from rollstream.look.monitor.format import plural, share
from rollstream.look.monitor.snapshot import RunSnapshot, RunWarning
from rollstream.printable import shell_command

# The first steps wait for the first trajectories, so means of fewer are not judged.
STEPS_MIN = 5
# The shares of ten steps vary by several points: a smaller expected gain gives no warning.
GAIN_MIN = 0.15
# The fewest changes are proposed that give this share of the largest gain.
ENOUGH = 0.95
# A side that is idle for longer has an unknown capacity.
IDLE_MAX = 0.99
# Rollouts that stay beyond those that were busy on average.
SPARE = 1.1


@dataclass(frozen=True, slots=True)
class PipelineBalance:
    """Rollouts, each on `rollout_gpus`, and a trainer on `trainer_gpus` (None: unknown, or none),
    with the share of time in which each side is idle.
    """

    rollouts: int
    rollout_gpus: int
    trainer_gpus: int | None
    rollouts_idle: float
    trainer_idle: float

    def gain(self, rollouts: int, trainer_gpus: int | None = None) -> float:
        """Returns the relative gain in tokens per second of other numbers; without `trainer_gpus`
        the trainer stays as it is.
        """
        return self._speed(rollouts, trainer_gpus) / self._speed(self.rollouts, None) - 1

    def _speed(self, rollouts: int, trainer_gpus: int | None) -> float:
        generating = rollouts / self.rollouts / (1 - min(IDLE_MAX, self.rollouts_idle))
        training = 1 / (1 - min(IDLE_MAX, self.trainer_idle))
        if trainer_gpus is not None and self.trainer_gpus:
            training *= trainer_gpus / self.trainer_gpus
        return min(generating, training)


def balance_of(at: RunSnapshot) -> PipelineBalance | None:
    """Returns the balance of a run, living or finished; None after too few steps."""
    lines = [line for line in at.rollouts if at.is_over or line.is_alive()]
    lines = [line for line in lines if line.state != "starting"]
    if at.pace.recent_steps < STEPS_MIN or not lines:
        return None
    # A finished run's rollouts are idle at its end, so their means since their start count.
    idle = fmean(line.idle_total if at.is_over else line.recent_idle_share for line in lines)
    computing = at.pace.busy_share / at.plan.trainer_threads
    return PipelineBalance(
        rollouts=len(lines),
        rollout_gpus=at.plan.rollout_gpus,
        trainer_gpus=at.plan.trainer_gpus,
        rollouts_idle=idle,
        # The trainer waits and computes at the same time: it is idle for at most the share of
        # waiting, and at most for the rest of its threads' time.
        trainer_idle=max(0.0, min(at.pace.wait_share, 1 - computing)),
    )


def more_rollouts(balance: PipelineBalance, room: int | None = None) -> tuple[int, float] | None:
    """Returns at most half as many again and at most `room`, that would help the trainer, and the
    gain; None below `GAIN_MIN`.
    """
    more_max = ceil(balance.rollouts / 2) if room is None else min(room, ceil(balance.rollouts / 2))
    gains = [(more, balance.gain(balance.rollouts + more)) for more in range(1, more_max + 1)]
    largest = max(gain for _, gain in gains)
    if largest < GAIN_MIN:
        return None
    return next(pair for pair in gains if pair[1] >= ENOUGH * largest)


def rollouts_needed(balance: PipelineBalance) -> int:
    """Returns the rollouts needed to generate as much as the present ones."""
    busy = balance.rollouts * (1 - balance.rollouts_idle)
    return min(balance.rollouts, max(1, ceil(SPARE * busy)))


def best_split(balance: PipelineBalance) -> tuple[int, int, float] | None:
    """The rollouts and trainer's GPUs, of the same GPUs in all, that give most, and the gain; None
    below `GAIN_MIN` or if the trainer's GPUs are unknown.
    """
    if not balance.trainer_gpus:
        return None
    each, present = balance.rollout_gpus, balance.rollouts
    gpus = present * each + balance.trainer_gpus
    splits = [(count, gpus - count * each) for count in range(1, (gpus - 1) // each + 1)]
    gains = [(count, trainer, balance.gain(count, trainer)) for count, trainer in splits]
    largest = max(gain for _, _, gain in gains)
    if largest < GAIN_MIN:
        return None
    close = [choice for choice in gains if choice[2] >= ENOUGH * largest]
    # Of about equal splits the one with the fewest changes.
    return min(close, key=lambda choice: abs(choice[0] - present))


def split_off(at: RunSnapshot) -> Iterator[RunWarning]:
    balance = balance_of(at)
    split = None if balance is None else best_split(balance)
    if balance is None or split is None:
        return
    rollouts, trainer, gain = split
    if rollouts > balance.rollouts:
        what = f"the trainer waits {share(balance.trainer_idle)} of a step"
    else:
        what = f"rollouts are idle {share(balance.rollouts_idle)} of the time"
    gpus = rollouts * balance.rollout_gpus + trainer
    yield RunWarning(
        "split_off",
        f"{what}: {plural(rollouts, 'rollout')} and {plural(trainer, 'GPU')} for the trainer, in "
        f"place of {balance.rollouts} and {balance.trainer_gpus}, would give about {gain:+.0%} "
        "tokens/s",
        f"rollouts.count = {rollouts} and trainer.processes = {trainer}; "
        f"`{shell_command('tune', 'RUN/config.json', '--gpus', gpus)}` simulates it",
    )
