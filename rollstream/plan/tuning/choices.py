"""The settings that `rollstream tune` chooses. GPUs are counted in units: on the CPU a unit is a
thread, with `paced` a modelled accelerator.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollstream.errors import ConfigurationError
from rollstream.run.config.settings import Configuration
from rollstream.simulator.experiment import PREDICTED

# More than twice as many would be far beyond the measured batch sizes.
SLOT_FACTORS = (0.25, 0.5, 1.0, 2.0)
"""Tried slots, relative to the present ones."""
REPACK_FACTORS = (0.25, 1.0, 4.0)  # tried repack periods, relative to the present one
SPLITS_MAX = 9  # splits of the GPUs that are tried before the best one is refined
HELD = ("split", "slots", "max_lag", "on_update", "repack", "drafts")


@dataclass(frozen=True, slots=True)
class TuningChoice:
    """Without `max_lag` the admitted and untrained groups are at most `waves` steps' groups;
    otherwise `waves` is `max_lag` + 1. `repack_every_s` is None where repack is off, and under
    every policy but `keep_version`.
    """

    rollouts: int
    trainer_gpus: int
    slots: int
    max_lag: int | None
    waves: int
    on_update: str
    repack_every_s: float | None
    drafts: bool

    def differences(self, other: "TuningChoice") -> int:
        return sum(
            getattr(self, field.name) != getattr(other, field.name)
            for field in fields(TuningChoice)
        )


@dataclass(frozen=True, slots=True)
class ChoiceSpace:
    """Ascending; one value where a part is held. `lags` are pairs of `max_lag` and `waves`,
    `repacks` apply under `keep_version`.
    """

    splits: tuple[tuple[int, int], ...]
    """Pairs of rollouts and units of the trainer."""
    slots: tuple[int, ...]
    lags: tuple[tuple[int | None, int], ...]
    policies: tuple[str, ...]
    repacks: tuple[float | None, ...]
    drafts: tuple[bool, ...]

    def permits(self, choice: TuningChoice) -> bool:
        return (choice.max_lag, choice.waves) in self.lags


def rollout_gpus(c: Configuration) -> int:
    r = c.rollouts
    return r.threads if r.kind.is_on_cpu(r) else r.kind.cards(r)


def trains_on_cpu(c: Configuration) -> bool:
    return c.has_model and c.trainer.device == "cpu"


def trainer_gpus(c: Configuration) -> int:
    """Returns threads of all workers on the CPU, ranks on GPUs."""
    if trains_on_cpu(c):
        return max(c.trainer.workers * c.trainer.threads, c.trainer.processes)
    return c.trainer.processes


def choice_of(c: Configuration) -> TuningChoice:
    d, groups = c.dispatch, c.trainer.groups_per_step
    keeps = c.rollouts.on_update == "keep_version"
    return TuningChoice(
        rollouts=c.rollouts.count,
        trainer_gpus=trainer_gpus(c),
        slots=c.rollouts.slots,
        max_lag=d.max_lag,
        waves=max(2, round(d.ready_groups_max / groups)) if d.max_lag is None else d.max_lag + 1,
        on_update=c.rollouts.on_update,
        repack_every_s=d.repack_every_s if d.repack and keeps else None,
        drafts=c.rollouts.is_drafting,
    )


def gpus_of(c: Configuration, choice: TuningChoice) -> int:
    return choice.rollouts * rollout_gpus(c) + choice.trainer_gpus


def choice_space(
    c: Configuration,
    gpus: int,
    *,
    lag_max: int | None = None,
    hold: frozenset[str] = frozenset(),
    has_drafts: bool = False,
) -> ChoiceSpace:
    """`lag_max` is by default the configuration's own bound; drafts are chosen only if their gain
    is known (`has_drafts`). Raises `ConfigurationError` if `gpus` are too few for one rollout and a
    trainer.
    """
    if c.rollouts.has_server:
        raise ConfigurationError(
            "rollouts.vllm.url: the engine belongs to another server, whose GPUs are not planned; "
            "tune a configuration whose rollouts open their own engines"
        )
    present, each = choice_of(c), rollout_gpus(c)
    splits = _splits(gpus, each)
    if "split" in hold:
        splits = ((present.rollouts, present.trainer_gpus),)
        if gpus_of(c, present) > gpus:
            raise ConfigurationError(
                f"--hold split: the configuration takes {gpus_of(c, present)} GPUs, --gpus gives "
                f"{gpus}; give --gpus {gpus_of(c, present)}, or do not hold the split"
            )
    if not splits:
        raise ConfigurationError(
            f"--gpus {gpus}: a rollout of this configuration takes {each} and the trainer at least "
            f"1, so give --gpus {each + 1} or more (trainer and rollouts on one GPU are not "
            "simulated)"
        )
    policies = (present.on_update,) if "on_update" in hold else tuple(PREDICTED)
    return ChoiceSpace(
        splits=splits,
        slots=(present.slots,) if "slots" in hold else _slots(present.slots),
        # The simulator does not know the cost of lag in learning.
        lags=((present.max_lag, present.waves),) if "max_lag" in hold else _lags(present, lag_max),
        policies=policies,
        repacks=_repacks(c, "repack" in hold),
        drafts=(False, True) if has_drafts and "drafts" not in hold else (present.drafts,),
    )


def _splits(gpus: int, each: int) -> tuple[tuple[int, int], ...]:
    # No GPU is idle except where rollouts take several each.
    return tuple((count, gpus - count * each) for count in range(1, (gpus - 1) // each + 1))


def _slots(present: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, round(present * factor)) for factor in SLOT_FACTORS}))


def _lags(present: TuningChoice, lag_max: int | None) -> tuple[tuple[int | None, int], ...]:
    bound_max = present.waves - 1 if lag_max is None else lag_max
    bounds = {0, bound_max} | {1 << power for power in range(16) if 1 << power <= bound_max}
    lags: list[tuple[int | None, int]] = [(bound, bound + 1) for bound in sorted(bounds)]
    # A configuration without a bound may keep none, with as much work outstanding or less.
    if present.max_lag is None:
        lags += [(None, bound + 1) for bound in sorted(bounds) if bound]
    return tuple(lags)


def _repacks(c: Configuration, is_held: bool) -> tuple[float | None, ...]:
    every_s = c.dispatch.repack_every_s
    if is_held:
        return (every_s if c.dispatch.repack else None,)
    return (None, *(factor * every_s for factor in REPACK_FACTORS))


def changed_settings(c: Configuration, choice: TuningChoice) -> Mapping[str, Any]:
    """Returns dotted key → value, from the configuration's choice to this one."""
    present, settings = choice_of(c), dict[str, Any]()
    if (choice.rollouts, choice.trainer_gpus) != (present.rollouts, present.trainer_gpus):
        settings |= _split_settings(c, present, choice)
    if choice.slots != present.slots:
        settings["rollouts.slots"] = choice.slots
    if (choice.max_lag, choice.waves) != (present.max_lag, present.waves):
        if choice.max_lag != present.max_lag:
            settings["dispatch.max_lag"] = choice.max_lag
        if choice.max_lag is None:
            settings["dispatch.ready_groups_max"] = choice.waves * c.trainer.groups_per_step
    if choice.on_update != present.on_update:
        settings["rollouts.on_update"] = choice.on_update
    if choice.on_update == "keep_version":
        every_s = choice.repack_every_s
        if (every_s is not None) != c.dispatch.repack:
            settings["dispatch.repack"] = every_s is not None
        if every_s is not None and every_s != c.dispatch.repack_every_s:
            settings["dispatch.repack_every_s"] = every_s
    if choice.drafts != present.drafts:
        settings["rollouts.drafts"] = "history" if choice.drafts else "off"
    return settings


def _split_settings(
    c: Configuration, present: TuningChoice, choice: TuningChoice
) -> Mapping[str, Any]:
    settings: dict[str, Any] = {}
    if choice.rollouts != present.rollouts:
        settings["rollouts.count"] = choice.rollouts
    if choice.trainer_gpus != present.trainer_gpus:
        settings |= _trainer_settings(c, present, choice)
    if c.devices.trainer is not None or c.devices.rollouts is not None:
        settings["devices.trainer"] = choice.trainer_gpus
        settings["devices.rollouts"] = choice.rollouts * rollout_gpus(c)
    return settings


def _trainer_settings(
    c: Configuration, present: TuningChoice, choice: TuningChoice
) -> Mapping[str, Any]:
    if not c.has_model:
        # A paced trainer's modelled accelerators are part of its seconds per token.
        token_s = c.paced.train_token_s * present.trainer_gpus / choice.trainer_gpus
        return {"paced.train_token_s": float(f"{token_s:.4g}")}
    if trains_on_cpu(c) and c.trainer.processes == 1:
        return {"trainer.workers": max(1, round(choice.trainer_gpus / c.trainer.threads))}
    return {"trainer.processes": choice.trainer_gpus}
