"""Log-probability mismatch between engine and trainer, by task. Pure.

`consumers/trainer/learn/mismatch.py` defines the comparison, which needs tokens of lag 0. If rollouts run
ahead, few steps have such tokens (the first step always does), so the figures cover the last steps
that compared any tokens, however old these steps are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollstream.streams.records import StepDone

TOKENS_PREFIX = "mismatch_tokens/"
COMPARED_STEPS = 10


@dataclass(frozen=True, slots=True)
class TaskMismatch:
    """One task's |Δ log p| in nats over `tokens` tokens of lag 0; mean and KL estimate are weighted
    by tokens. `step` is the newest step with such tokens. If the task's newest step had none,
    `near_mean` is its mean at its smallest lag, `near_lag`.
    """

    tokens: int
    mean: float
    largest: float
    kl: float
    above_share: float
    step: int
    near_lag: int | None = None
    near_mean: float = 0.0


def mismatch_by_task(steps: Sequence[StepDone]) -> dict[str, TaskMismatch]:
    """Returns the mismatch of every task that these steps trained."""
    names = {name for done in steps for name in done.metrics if name.startswith(TOKENS_PREFIX)}
    return {task: _task_mismatch(task, steps) for task in sorted(n.removeprefix(TOKENS_PREFIX) for n in names)}


def _task_mismatch(task: str, steps: Sequence[StepDone]) -> TaskMismatch:
    def figure(done: StepDone, name: str) -> float:
        return done.metrics.get(f"mismatch_{name}/{task}", 0.0)

    def mean(name: str) -> float:
        weighted = sum(figure(done, "tokens") * figure(done, name) for done in compared)
        return weighted / max(1.0, tokens)

    newest = next(done for done in reversed(steps) if TOKENS_PREFIX + task in done.metrics)
    compared = [done for done in steps if figure(done, "tokens")][-COMPARED_STEPS:]
    tokens = sum(figure(done, "tokens") for done in compared)
    is_far = f"mismatch_near_lag/{task}" in newest.metrics
    return TaskMismatch(
        tokens=int(tokens),
        mean=mean("mean"),
        largest=max((figure(done, "max") for done in compared), default=0.0),
        kl=mean("kl"),
        above_share=mean("above"),
        step=compared[-1].step if compared else 0,
        near_lag=int(figure(newest, "near_lag")) if is_far else None,
        near_mean=figure(newest, "near_mean"),
    )
