"""Warnings about the flow: overdue steps, silent or starved processes, high lag.

Pure, one function per warning; the comment of each threshold holds its arithmetic.
"""

from collections.abc import Iterator
from statistics import fmean

from rollstream.monitor.format import age, share, shortened
from rollstream.monitor.rollouts import RolloutSnapshot
from rollstream.monitor.snapshot import RunSnapshot, RunWarning

STEP_TIMES, STEP_S = 5.0, 30.0
"""A step is overdue after five medians and at least half a minute: the longest of 60 quickstart
steps takes two medians, and a restart of the trainer about 10 s.
"""
FIRST_STEP_S = 600.0
"""The default deadline of a group: a single straggler cannot explain a longer wait."""
IDLE_SHARE = 0.5
"""Half of the slots' time is unused."""
WAIT_SHARE = 0.5
"""The trainer could finish a step in half the time."""
STEPS_MIN = 5
"""Steps before means are evaluated: the first ones wait for the first trajectories."""
FULL_SHARE = 0.9
"""Share of the permitted open groups; above it rollouts soon wait for admissions."""
LAG_SHARE = 0.8
"""Share of `max_lag`: with a mean this close to it, the oldest tokens are always masked."""
MASKED_SHARE = 0.05
"""One generated token in twenty is masked for its lag."""
EXPIRED_SHARE, EXPIRED_MIN = 0.02, 2
"""One group in fifty; a single one may be a straggler."""
DEATHS_MIN, DEATHS_S = 3, 600.0
"""Three deaths in ten minutes are more than an accident."""


def run_silent(at: RunSnapshot) -> Iterator[RunWarning]:
    """No record is written although the run is not over: its processes are gone."""
    if at.is_quiet:
        quiet_s = min(at.record_ages.values(), default=0.0)
        yield RunWarning(
            "run_silent",
            f"nothing has been written for {age(quiet_s)}: the run's processes are gone or stuck",
            "restart it, it resumes from its last checkpoint "
            "(rollstream run RUN/config.json); logs/ contain the reason",
        )


def step_overdue(at: RunSnapshot) -> Iterator[RunWarning]:
    if at.is_over or at.is_quiet or at.is_starting or at.step >= at.steps:
        return
    if at.step and at.pace.since_step_s is not None and at.pace.step_s is not None:
        if at.pace.since_step_s > max(STEP_S, STEP_TIMES * at.pace.step_s):
            usual = age(at.pace.step_s)
            yield RunWarning(
                "step_overdue",
                f"no step for {age(at.pace.since_step_s)}; a step takes {usual} (median)",
                "see logs/trainer.log, and whether trajectories still come (rates, open groups)",
            )
    elif not at.step and at.version is not None and at.seconds > FIRST_STEP_S:
        yield RunWarning(
            "step_overdue",
            f"no first step after {age(at.seconds)}",
            "see logs/trainer.log and logs/rollout-*.log; fewer trainer.groups_per_step or "
            "shorter answers (sampling.tokens_max) make a first step come earlier",
        )


def rollouts_silent(at: RunSnapshot) -> Iterator[RunWarning]:
    limit_s = at.plan.heartbeat_timeout_s
    silent = [one for one in at.rollouts if one.state == "silent" and one.silent_s > limit_s]
    if not silent or at.is_over or at.is_quiet or at.is_starting:
        return
    verb = "are" if len(silent) > 1 else "is"
    yield RunWarning(
        "rollouts_silent",
        f"{_rollout_names(silent)} {verb} silent for {age(max(one.silent_s for one in silent))}",
        "their trajectories resume on other rollouts; see their logs, and restart them if no "
        "supervisor does",
    )


def rollouts_starved(at: RunSnapshot) -> Iterator[RunWarning]:
    """Idle slots; the advice depends on the missing input: admissions or prompts."""
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
        do = "see logs/dispatch.log; raise dispatch.queue_per_slot if assignments arrive slowly"
    yield RunWarning("rollouts_starved", f"rollouts are idle {share(idle)} of the time", do)


def trainer_starved(at: RunSnapshot) -> Iterator[RunWarning]:
    if at.pace.recent_steps < STEPS_MIN or at.is_over or at.pace.wait_share <= WAIT_SHARE:
        return
    if at.queue.ready_groups < at.plan.groups_per_step:
        yield RunWarning(
            "trainer_starved",
            f"the trainer waits {share(at.pace.wait_share)} of a step for trajectories",
            "more rollouts or slots, shorter answers, or a higher dispatch.max_lag",
        )


def queue_full(at: RunSnapshot) -> Iterator[RunWarning]:
    """Nearly all permitted open groups wait for the trainer."""
    most = at.plan.groups_max()
    if not at.is_over and at.step < at.steps and at.queue.ready_groups >= FULL_SHARE * most:
        bound = "ready_groups_max" if at.plan.max_lag is None else "max_lag"
        yield RunWarning(
            "queue_full",
            f"{at.queue.ready_groups} complete groups wait for the trainer; "
            f"dispatch.{bound} allows {most} open ones",
            "the trainer is the slower side: more trainer.workers, or fewer rollouts",
        )


def lag_high(at: RunSnapshot) -> Iterator[RunWarning]:
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
        yield RunWarning(
            "lag_high",
            ", ".join(what),
            "fewer rollouts or more trainer.workers for fresher data; a higher dispatch.max_lag "
            "or shorter answers (sampling.tokens_max) if many tokens are masked",
        )


def roles_dying(at: RunSnapshot) -> Iterator[RunWarning]:
    recent = [death for death in at.deaths if death.ago_s < DEATHS_S]
    if len(recent) >= DEATHS_MIN and not at.is_over:
        roles = ", ".join(sorted({death.role for death in recent}))
        yield RunWarning(
            "roles_dying",
            f"{len(recent)} deaths within {age(DEATHS_S)}: {roles}",
            "see the end of their logs (logs/)",
        )


def _rollout_names(lines: list[RolloutSnapshot]) -> str:
    """Returns the first three names and the number of the others."""
    names = [shortened(line.name, 24) for line in lines[:3]]
    more = len(lines) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


STANDSTILL_CHECKS = (run_silent, step_overdue, rollouts_silent, roles_dying)
PACE_CHECKS = (trainer_starved, rollouts_starved, queue_full, lag_high)
