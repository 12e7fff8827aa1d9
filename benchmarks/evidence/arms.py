"""The runs of the evidence: worlds (a task and a model) times arms (a schedule and a loss) times
seeds. All arms of a world and seed start from the same warm model and have common random numbers:
the same prompts in the same order, and sampling that is a function of seed, trajectory and
position (invariant 10).

`max_lag` bounds the lag, and on two cores a run stays far below its bound. So the arms `behind_…`
hold data back: their rule of choice leaves so many steps' worth of complete groups untouched, and
the lag is what its name says, up to one step more. Every arm records the lag that it had.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runs.quickstart import QUICKSTART
from rollstream.consumers.trainer.data.selection import GroupCandidate, oldest
from testbed.repository import EXAMPLES

GROUPS_PER_STEP = 24
STEPS_MAX = 200
"""More steps than any run needs: a run ends at its number of trained tokens. So the rules below,
which never touch the newest groups, do not come to the end of the prompts.
"""
COMMON = (
    f"trainer.steps={STEPS_MAX}", f"trainer.groups_per_step={GROUPS_PER_STEP}",
    "trainer.lr_final=1", "evaluation.enabled=false", "weights.keep_every=1",
    f"weights.versions_max={STEPS_MAX + 1}",
)  # fmt: skip
"""The learning rate stays constant after its ramp, because a decay would depend on `STEPS_MAX`."""
STRESS = ("trainer.lr=2e-3", "trainer.updates_per_step=4")
"""Four times the learning rate, four updates of a quarter of the groups: the off-policy distance
grows within a step, too.
"""


@dataclass(frozen=True, slots=True)
class World:
    """A task and a model. A run's outcome is the sampled accuracy of the first version behind
    `tokens` trained tokens, over the configuration's held-out prompts, `samples` answers each.
    """

    name: str
    configuration: Path
    settings: tuple[str, ...]
    tokens: int
    samples: int = 16


@dataclass(frozen=True, slots=True)
class Arm:
    """A schedule and a loss. `reference` is the arm without lag that it is compared with, "" for
    such an arm itself.
    """

    name: str
    settings: tuple[str, ...]
    reference: str = ""


PROMPTS = "evaluation.prompts=200"
LARGER = (
    "model.config.hidden_size=256", "model.config.intermediate_size=768",
    "model.config.num_hidden_layers=4", "model.config.head_dim=64",
)  # fmt: skip
"""3.1 M parameters in place of .6 M."""
WORLDS = {
    one.name: one
    for one in (
        # After 306 297 tokens a synchronous run had .92 of at most .96, where differences shrink.
        World("remainder-0.6M", QUICKSTART, (PROMPTS,), 200_000),
        World("remainder-3M", QUICKSTART, (PROMPTS, *LARGER), 200_000),
        World("reasoning-gym", EXAMPLES / "reasoning-gym.toml", (PROMPTS,), 60_000),
    )
}
"""All must have enough seeds before the question of lag is decided: two tasks, two sizes."""


def _behind(steps: int) -> tuple[str, ...]:
    return (
        f"dispatch.max_lag={steps + 1}",
        f"trainer.choose=benchmarks.evidence.arms:behind_{steps}",
    )


LOSSES = {
    "uncorrected": ("trainer.ratio=none",),
    "default": (),
    **{name: (f"trainer.preset={name}",) for name in ("dapo", "cispo", "gspo", "dppo")},
}
"""`uncorrected` is REINFORCE that takes stale answers for fresh ones; `default` is the quickstart's
loss, truncated importance sampling.
"""
LAGS = (
    Arm("lag0", ("dispatch.max_lag=0",)),
    Arm("lag8", ("dispatch.max_lag=8",), "lag0"),
    Arm("behind8", _behind(8), "lag0"),
)
STRESSES = (
    Arm("stress_lag0", ("dispatch.max_lag=0", *STRESS)),
    *(
        Arm(f"stress_{name}", (*_behind(16), *STRESS, *settings), "stress_lag0")
        for name, settings in LOSSES.items()
    ),
)
ARMS = {one.name: one for one in (*LAGS, *STRESSES)}


def behind_8(candidates: Sequence[GroupCandidate], groups: int) -> Sequence[int]:
    """Rule of choice (`trainer.choose`): trains eight steps behind what is generated."""
    return held_back(candidates, groups, 8 * GROUPS_PER_STEP)


def behind_16(candidates: Sequence[GroupCandidate], groups: int) -> Sequence[int]:
    """Rule of choice: trains sixteen steps behind what is generated."""
    return held_back(candidates, groups, 16 * GROUPS_PER_STEP)


def held_back(candidates: Sequence[GroupCandidate], groups: int, behind: int) -> Sequence[int]:
    """Chooses the oldest groups as long as `behind` complete ones stay; a whole update's worth or
    nothing, so that micro-batches stay full.
    """
    return oldest(candidates, groups) if len(candidates) >= behind + groups else ()
