"""Warnings about the flow: steps that do not come, processes that are silent or starve, lag. Pure,
one function per matter; each threshold carries its arithmetic.
"""

from collections.abc import Iterator
from statistics import fmean

from rollstream.live.rollouts import RolloutLine
from rollstream.live.snapshot import Snapshot
from rollstream.live.words import age, share, shortened
from rollstream.warnings.concern import Concern

STEP_TIMES, STEP_S = 5.0, 30.0
"""A step that takes five medians, and half a minute: the longest of 60 quickstart steps takes two
medians, and a restart of the trainer some 10 s.
"""
FIRST_STEP_S = 600.0
"""The default deadline of a group: after that even one straggler no longer explains it."""
IDLE_SHARE = 0.5
"""Half of the slots' time is paid for nothing."""
WAIT_SHARE = 0.5
"""The trainer could do a step in half the time."""
STEPS_MIN = 5
"""Steps before means are judged: the first ones wait for the first trajectories."""
FULL_SHARE = 0.9
"""Of all that may be open; above it rollouts soon stop for want of admission."""
LAG_SHARE = 0.8
"""Of `max_lag`: a mean so near means that the oldest tokens are masked all the time."""
MASKED_SHARE = 0.05
"""One generated token in twenty is thrown away for its age."""
EXPIRED_SHARE, EXPIRED_MIN = 0.02, 2
"""One group in fifty; a single one may be a straggler."""
DEATHS_MIN, DEATHS_S = 3, 600.0
"""Three deaths in ten minutes are no accident of a machine."""


def run_silent(at: Snapshot) -> Iterator[Concern]:
    """Nothing is written at all: the processes are gone."""
    if at.is_quiet:
        quiet_s = min(at.record_ages.values(), default=0.0)
        yield Concern(
            "run_silent",
            f"nothing has been written for {age(quiet_s)}: the run's processes are gone or stuck",
            "start it again, it goes on from its last checkpoint "
            "(rollstream run RUN/config.json); logs/ say why it ended",
        )


def step_overdue(at: Snapshot) -> Iterator[Concern]:
    if at.is_over or at.is_quiet or at.is_starting or at.step >= at.steps:
        return
    if at.step and at.pace.since_step_s is not None and at.pace.step_s is not None:
        if at.pace.since_step_s > max(STEP_S, STEP_TIMES * at.pace.step_s):
            usual = age(at.pace.step_s)
            yield Concern(
                "step_overdue",
                f"no step for {age(at.pace.since_step_s)}; a step takes {usual} (median)",
                "see logs/trainer.log, and whether trajectories still come (rates, open groups)",
            )
    elif not at.step and at.version is not None and at.seconds > FIRST_STEP_S:
        yield Concern(
            "step_overdue",
            f"no first step after {age(at.seconds)}",
            "see logs/trainer.log and logs/rollout-*.log; fewer trainer.groups_per_step or "
            "shorter answers (sampling.tokens_max) make a first step come earlier",
        )


def rollouts_silent(at: Snapshot) -> Iterator[Concern]:
    limit_s = at.plan.heartbeat_timeout_s
    silent = [one for one in at.rollouts if one.state == "silent" and one.silent_s > limit_s]
    if not silent or at.is_over or at.is_quiet or at.is_starting:
        return
    verb = "are" if len(silent) > 1 else "is"
    yield Concern(
        "rollouts_silent",
        f"{_names(silent)} {verb} silent for {age(max(one.silent_s for one in silent))}",
        "what they generated goes on elsewhere; see their logs, and start them again if nobody "
        "does",
    )


def rollouts_starved(at: Snapshot) -> Iterator[Concern]:
    """Idle slots, by what is missing: admission (the trainer is behind) or prompts."""
    alive = [one for one in at.rollouts if one.is_alive() and one.state != "starting"]
    if at.is_over or at.step >= at.steps or not alive or at.pace.recent_steps < STEPS_MIN:
        return
    idle = fmean(one.idle_share for one in alive)
    if idle <= IDLE_SHARE:
        return
    if at.queue.open_groups >= FULL_SHARE * at.plan.groups_max():
        do = "the trainer is the slower side: fewer rollouts, more trainer.workers, or a higher "
        do += "dispatch.max_lag"
    elif not at.queue.unread_prompts:
        do = "no prompt is waiting: see logs/prompts.log and whether the data set is exhausted"
    else:
        do = "see logs/dispatch.log; raise dispatch.queue_per_slot where orders travel far"
    yield Concern("rollouts_starved", f"rollouts are idle {share(idle)} of the time", do)


def trainer_starved(at: Snapshot) -> Iterator[Concern]:
    if at.pace.recent_steps < STEPS_MIN or at.is_over or at.pace.wait_share <= WAIT_SHARE:
        return
    if at.queue.ready_groups < at.plan.groups_per_step:
        yield Concern(
            "trainer_starved",
            f"the trainer waits {share(at.pace.wait_share)} of a step for trajectories",
            "more rollouts or slots, shorter answers, or a higher dispatch.max_lag",
        )


def queue_full(at: Snapshot) -> Iterator[Concern]:
    """As many groups wait for the trainer as may be open at all."""
    most = at.plan.groups_max()
    if not at.is_over and at.step < at.steps and at.queue.ready_groups >= FULL_SHARE * most:
        bound = "ready_groups_max" if at.plan.max_lag is None else "max_lag"
        yield Concern(
            "queue_full",
            f"{at.queue.ready_groups} complete groups wait for the trainer; "
            f"dispatch.{bound} allows {most} open ones",
            "the trainer is the slower side: more trainer.workers, or fewer rollouts",
        )


def lag_high(at: Snapshot) -> Iterator[Concern]:
    most = at.plan.max_lag
    mean = at.lag.mean or 0.0
    is_judged = at.pace.recent_steps >= STEPS_MIN
    what: list[str] = []
    if is_judged and most is not None and most > 1 and mean > LAG_SHARE * most:
        what.append(f"the mean lag when trained is {mean:.1f} of at most {most}")
    if is_judged and at.lag.masked_share > MASKED_SHARE:
        what.append(f"{share(at.lag.masked_share)} of generated tokens are masked for their lag")
    expired, total = at.outcomes.groups.get("expired", 0), sum(at.outcomes.groups.values())
    if expired >= EXPIRED_MIN and expired > EXPIRED_SHARE * total:
        what.append(f"{expired} of {total} groups expired")
    if what:
        yield Concern(
            "lag_high",
            ", ".join(what),
            "fewer rollouts or more trainer.workers for fresher data; a higher dispatch.max_lag "
            "or shorter answers (sampling.tokens_max) where much is thrown away",
        )


def roles_dying(at: Snapshot) -> Iterator[Concern]:
    recent = [death for death in at.deaths if death.ago_s < DEATHS_S]
    if len(recent) >= DEATHS_MIN and not at.is_over:
        roles = ", ".join(sorted({death.role for death in recent}))
        yield Concern(
            "roles_dying",
            f"{len(recent)} deaths within {age(DEATHS_S)}: {roles}",
            "the end of their logs (logs/) says why",
        )


def _names(lines: list[RolloutLine]) -> str:
    """The first three."""
    names = [shortened(line.name, 24) for line in lines[:3]]
    more = len(lines) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


STANDSTILL = (run_silent, step_overdue, rollouts_silent, roles_dying)
PACE = (trainer_starved, rollouts_starved, queue_full, lag_high)
