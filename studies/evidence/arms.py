"""The runs of the evidence: worlds (a task and a model) times arms (a lag and a loss) times seeds.
All arms of a world start from the same warm model. Those of a seed have common random numbers: the
same prompts in the same order, and sampling that is a function of seed, trajectory and position
(invariant 10).

`stepped_run.py` makes a run in one process, where the lag is the arm's: each token of a step
is of the version `lag` steps older than the one trained from, in the first steps of version 0.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.runs.quickstart import QUICKSTART
from rollstream.consumers.objective_settings import OBJECTIVE_PRESETS, ObjectiveSettings
from rollstream.run.config.policy_defaults import DEFAULT_PRESET
from studies.evidence.stepped_run import Schedule
from testbed.repository import EXAMPLES

STEPS_MAX = 200
"""More steps than any run needs: a run ends at its number of trained tokens."""
TRUNCATED_IS = (
    "trainer.advantage=grpo", "trainer.loss=truncated_is", "trainer.ratio_max=2.0",
    "trainer.aggregate=token",
)  # fmt: skip
"""The loss of the arms whose names have none: truncated importance sampling, as PipelineRL."""
COMMON = (
    f"trainer.steps={STEPS_MAX}", "trainer.lr_final=1", "trainer.workers=1", "trainer.threads=1",
    *TRUNCATED_IS,
)  # fmt: skip
"""The learning rate stays constant after its ramp, because a decay would depend on `STEPS_MAX`."""
STRESS_LAG = 8  # steps of two updates each: tokens are up to 17 updates old
STRESS = ("trainer.lr=1e-3", "trainer.updates_per_step=2")
"""Twice the learning rate, two updates of half of the groups. At four times the rate and four
updates both `uncorrected` and `truncated_is` collapsed within 20 steps, too: a stress in which
nothing survives tells corrections apart as little as one in which everything does.
"""
FLOW_LAG = 6
"""Steps behind in the arms in which versions change within trajectories."""

SYNCHRONOUS = Schedule(0)


@dataclass(frozen=True, slots=True)
class World:
    """A task and a model. A run's outcome is the sampled accuracy of the first version behind
    `tokens` trained tokens, over `prompts` held-out prompts.
    """

    name: str
    configuration: Path
    settings: tuple[str, ...]
    tokens: int
    prompts: int = 200


@dataclass(frozen=True, slots=True)
class Arm:
    """A lag and a loss. `reference` is the arm that it is compared with, "" for one without.
    `recorded` names the arm whose trajectories it trains, in place of generating. `samples` are
    the sampled answers to each held-out prompt.
    """

    name: str
    settings: tuple[str, ...] = ()
    reference: str = ""
    schedule: Schedule = SYNCHRONOUS
    recorded: str = ""
    samples: int = 16


LARGER = (
    "model.config.hidden_size=256", "model.config.intermediate_size=768",
    "model.config.num_hidden_layers=4", "model.config.head_dim=64",
)  # fmt: skip
"""3.1 M parameters in place of .6 M."""
WORLDS = {
    one.name: one
    for one in (
        # After 306 297 tokens a synchronous run had .92 of at most .96, where differences shrink.
        World("remainder-0.6M", QUICKSTART, (), 200_000),
        World("remainder-3M", QUICKSTART, LARGER, 200_000),
        World("reasoning-gym", EXAMPLES / "reasoning-gym.toml", (), 60_000),
    )
}
"""All must have enough seeds before the question of lag is decided: two tasks, two sizes."""


def _lagged(name: str, lag: int, reference: str) -> Arm:
    return Arm(name, (), reference, Schedule(lag))


def _stressed(name: str, lag: int, reference: str, *settings: str) -> Arm:
    """Few answers: a collapsed model writes each to the limit of its length."""
    return Arm(name, (*STRESS, *settings), reference, Schedule(lag), samples=4)


def _fresh(name: str) -> str:
    """Returns the arm without lag that a stressed loss is compared with: for the default itself."""
    return f"stress_lag0_{name}" if name == DEFAULT_PRESET else "stress_lag0"


SPELLED_OUT = ("advantage", "loss", "ratio_max", "aggregate")
"""The settings of `TRUNCATED_IS`, which an arm with a preset sets, too."""


def preset_settings(name: str) -> tuple[str, ...]:
    """Returns a preset, with the settings that `TRUNCATED_IS` has spelled out."""
    preset, fields = OBJECTIVE_PRESETS[name], ObjectiveSettings.model_fields
    values = {key: preset.get(key, fields[key].default) for key in SPELLED_OUT}
    return (
        f"trainer.preset={name}",
        *(f"trainer.{key}={value}" for key, value in values.items()),
    )


LOSSES = {
    "uncorrected": ("trainer.ratio=none",),
    "truncated_is": (),
    "icepop": ("trainer.mask_ratio=[0.5,2.0]",),
    "sequence_mask": ("trainer.mask_sequence=[0.99,1.01]",),
    "ess_scale": ("trainer.ess_guard=scale",),
    **{
        name: preset_settings(name)
        for name in ("dapo", "cispo", "gspo", "dppo", "topr", "decoupled_ppo")
    },
}
"""`uncorrected` is REINFORCE that takes stale answers for fresh ones; the three losses after
`truncated_is` add one part to it.
"""
PRESETS = (
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "aipo", "topr", "dppo", "decoupled_ppo",
    "reinforce_pp", "rloo",
)  # fmt: skip
LAGS = (
    Arm("lag0"),
    _lagged("lag2", 2, "lag0"),
    _lagged("lag8", 8, "lag0"),
    _lagged("lag16", 16, "lag0"),
)
CHOICES = tuple(
    Arm(f"lag{lag}_{name}", preset_settings(name), f"lag0_{name}" if lag else "lag0", Schedule(lag))
    for name in ("gspo", DEFAULT_PRESET)
    for lag in (0, 8)
)
"""Losses that bore the stress, without it."""
STRESSES = (
    _stressed("stress_lag0", 0, ""),
    _stressed(f"stress_lag0_{DEFAULT_PRESET}", 0, "stress_lag0", *preset_settings(DEFAULT_PRESET)),
    *(
        _stressed(f"stress_{name}", STRESS_LAG, _fresh(name), *settings)
        for name, settings in LOSSES.items()
    ),
)
FLOWS = tuple(
    Arm(
        f"flow_{mode}",
        (f"rollouts.on_update={mode}",),
        "" if mode == "keep_version" else "flow_keep_version",
        Schedule(FLOW_LAG, mode, slots=96),
    )
    for mode in ("keep_version", "in_flight", "in_flight_recompute")
)
"""Running batches at an equal lag: versions change within a trajectory or not."""
RECORDED = tuple(
    Arm(f"recorded_{name}", preset_settings(name), "lag8", Schedule(8), "lag8") for name in PRESETS
)
"""The trajectories of `lag8`, trained under each preset."""
TRL = Arm("trl", (), "lag0")
"""TRL's trainer, synchronous (`trl_run.py`); the only arm that `evidence_runs` does not make."""
MADE = (*LAGS, *CHOICES, *STRESSES, *FLOWS, *RECORDED)
ARMS = {one.name: one for one in (*MADE, TRL)}
ROLES = "roles_lag0"
"""The row of a run by the product's own processes; no piece makes it."""
