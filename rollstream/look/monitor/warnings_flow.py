"""Warnings about a run's progress, its data, and the mismatch of engine and trainer
(docs/explanation/learning.md): pure functions of a `RunSnapshot`.
"""

from collections.abc import Iterator
from math import floor
from statistics import fmean

from rollstream.look.monitor.format import age, count, plain_text, plural, share, shortened
from rollstream.look.monitor.rollouts import RolloutSnapshot
from rollstream.look.monitor.snapshot import RunSnapshot, RunWarning
from rollstream.look.monitor.warnings_split import (
    STEPS_MIN,
    balance_of,
    more_rollouts,
    rollouts_needed,
    split_off,
)

# A step is overdue after five times the median step, and half a minute at least. The longest of 60
# quickstart steps takes two medians, and a restart of the trainer about 10 s.
STEP_TIMES, STEP_S = 5.0, 30.0
# The default deadline of a group (`dispatch.group_deadline_s`): a single slow trajectory cannot
# explain a longer wait for the first step.
FIRST_STEP_S = 600.0
# Above it rollouts have nothing to decode for more than half of the time.
IDLE_SHARE = 0.5
# Of a step: above it the step could take half the time.
WAIT_SHARE = 0.5
# Of the permitted open groups (`RunSettings.groups_max`); above it rollouts soon wait for
# admissions.
FULL_SHARE = 0.9
# Of `max_lag`: closer to it the oldest tokens of each step are masked.
LAG_SHARE = 0.8
# One generated token in twenty may be masked for its lag.
MASKED_SHARE = 0.05
# More than one group in fifty has expired, and at least two: a single one may be an outlier.
EXPIRED_SHARE, EXPIRED_MIN = 0.02, 2


def run_unreadable(at: RunSnapshot) -> Iterator[RunWarning]:
    if at.trouble:
        yield RunWarning(
            "run_unreadable",
            plain_text(at.trouble, 400),
            "check that log and store answer from here (rollstream config RUN bus, store); values "
            "that need it are those of the last read",
        )


def step_overdue(at: RunSnapshot) -> Iterator[RunWarning]:
    if at.is_over or at.is_quiet or at.is_starting or at.step >= at.steps:
        return
    since_s, limit_s = at.pace.since_step_s, STEP_TIMES * (at.pace.step_s or 0.0)
    if at.trainer_age_s is not None and since_s is not None and at.trainer_age_s < since_s:
        # A trainer that was started again loads and repeats the step.
        since_s, limit_s = at.trainer_age_s, max(limit_s, FIRST_STEP_S)
    if at.step and since_s is not None and at.pace.step_s is not None:
        if since_s > max(STEP_S, limit_s):
            usual = age(at.pace.step_s)
            yield RunWarning(
                "step_overdue",
                f"no step for {age(since_s)}; a step takes {usual} (median)",
                "see logs/trainer.log, and whether trajectories still come (rates, open groups)",
            )
    elif not at.step and at.version is not None and at.elapsed_s > FIRST_STEP_S:
        yield RunWarning(
            "step_overdue",
            f"no first step after {age(at.elapsed_s)}",
            "see logs/trainer.log and logs/rollout-*.log; fewer trainer.groups_per_step or "
            "shorter answers (sampling.tokens_max) make a first step come earlier",
        )


def rollouts_starved(at: RunSnapshot) -> Iterator[RunWarning]:
    """Rollouts have nothing to decode most of the time, with the cause: permitted groups that are
    all open and wait for the trainer or for their rewards, no prompt, or slow assignments.
    """
    idle = _idle_share(at)
    if idle <= IDLE_SHARE or _needs_no_groups(at):
        return
    what, balance = f"rollouts are idle {share(idle)} of the time", balance_of(at)
    if _groups_wait(at) and _trainer_waits(at):
        what += f", and the trainer waits {share(at.pace.wait_share)} of a step"
        do = "open groups wait for their rewards or their last answers: a faster reward (more "
        do += "task.reward_processes or a faster service), or a higher dispatch.max_lag"
    elif _groups_wait(at):
        do = f"the trainer is the slower side: fewer rollouts{_faster_trainer(at)}, or a higher "
        do += "dispatch.max_lag"
        if balance is not None and (needed := rollouts_needed(balance)) < balance.rollouts:
            what += f": {needed} of {balance.rollouts} would train as fast"
    elif 2 * sum(line.state in ("pulling", "draining") for line in _alive(at)) > len(_alive(at)):
        do = "they wait for new weights: see whether store or relay are slow (logs/rollout-*.log), "
        do += 'or set rollouts.on_update = "in_flight"'
    elif not at.queue.unread_prompts:
        do = "no prompt is waiting: see logs/prompts.log and whether the data set is exhausted"
    else:
        do = "see logs/dispatch.log; raise dispatch.queue_per_slot if assignments arrive slowly"
    yield RunWarning("rollouts_starved", what, do)


def _idle_share(at: RunSnapshot) -> float:
    alive = _alive(at)
    if at.is_over or at.step >= at.steps or not alive or at.pace.recent_steps < STEPS_MIN:
        # The share cannot be judged.
        return 0.0
    return fmean(rollout.recent_idle_share for rollout in alive)


def _alive(at: RunSnapshot) -> list[RolloutSnapshot]:
    return [line for line in at.rollouts if line.is_alive() and line.state != "starting"]


def _needs_no_groups(at: RunSnapshot) -> bool:
    # At the end of a run rollouts rightly have nothing to do.
    return at.queue.open_groups >= (at.steps - at.step) * at.plan.groups_per_step


def _faster_trainer(at: RunSnapshot) -> str:
    if at.plan.trainer_gpus is not None:
        return ", more trainer.processes on further GPUs"
    if at.machine is None:
        return ", more trainer.workers on idle cores"
    return ", more trainer.workers" if at.machine.spare_cores >= 1 else ""


def _groups_wait(at: RunSnapshot) -> bool:
    return at.queue.open_groups >= FULL_SHARE * at.plan.groups_max()


def _trainer_waits(at: RunSnapshot) -> bool:
    # It waits and computes at the same time, so what its threads compute is no waiting.
    waiting = min(at.pace.wait_share, 1 - at.pace.busy_share / at.plan.trainer_threads)
    if at.pace.recent_steps < STEPS_MIN or waiting <= WAIT_SHARE:
        return False
    return at.queue.ready_groups < at.plan.groups_per_step


def trainer_starved(at: RunSnapshot) -> Iterator[RunWarning]:
    """The trainer of a living or finished run waits for trajectories most of the time and too few
    groups are ready, with the gain that more rollouts would give.
    """
    # If another split of the run's GPUs would help, `split_off` warns instead.
    if not _trainer_waits(at) or next(split_off(at), None):
        return
    # Rollouts wait as well, for groups that are all open: more of them would not help, and
    # `rollouts_starved` warns.
    if (_idle_share(at) > IDLE_SHARE and _groups_wait(at)) or _needs_no_groups(at):
        return
    if not at.is_over and any(rollout.state == "starting" for rollout in at.rollouts):
        # More rollouts come already.
        return
    what = f"the trainer waits {share(at.pace.wait_share)} of a step for trajectories"
    balance, room = balance_of(at), _room_for_rollouts(at)
    if balance is not None and room != 0 and (more := more_rollouts(balance, room)) is not None:
        number, gain = more
        what += f": {plural(number, 'more rollout')} would give about {gain:+.0%} tokens/s"
    if room == 0 and at.machine is not None:
        what += f"; {at.machine.busy_cores:.1f} of {at.machine.cores:g} cores are busy"
        do = "rollouts on another machine or a GPU, or shorter answers (sampling.tokens_max); here "
        do += "more rollouts would only divide the same cores"
    elif at.plan.rollout_cores is None:
        do = "more rollouts (on further GPUs) or slots, shorter answers, or a higher "
        do += "dispatch.max_lag; `rollstream tune` simulates them"
    else:
        do = "more rollouts where cores are idle, shorter answers, or a higher dispatch.max_lag; "
        do += "`rollstream tune` simulates them"
    yield RunWarning("trainer_starved", what, do)


def _room_for_rollouts(at: RunSnapshot) -> int | None:
    if at.plan.rollout_cores is None:
        # Cores are no limit here, but GPUs may be.
        return None
    # No number can be promised.
    if at.machine is None or at.is_over:
        return 0
    return floor(at.machine.spare_cores / at.plan.rollout_cores + 0.1)


def queue_full(at: RunSnapshot) -> Iterator[RunWarning]:
    groups_max = at.plan.groups_max()
    if not at.is_over and at.step < at.steps and at.queue.ready_groups >= FULL_SHARE * groups_max:
        bound = "ready_groups_max" if at.plan.max_lag is None else "max_lag"
        yield RunWarning(
            "queue_full",
            f"{at.queue.ready_groups} complete groups wait for the trainer; "
            f"dispatch.{bound} allows {groups_max} open ones",
            f"the trainer is the slower side: fewer rollouts{_faster_trainer(at)}",
        )


def lag_high(at: RunSnapshot) -> Iterator[RunWarning]:
    max_lag = at.plan.max_lag
    mean = at.lag.mean or 0.0
    is_judged = at.pace.recent_steps >= STEPS_MIN
    what: list[str] = []
    if is_judged and max_lag is not None and max_lag > 1 and mean > LAG_SHARE * max_lag:
        what.append(f"the mean lag when trained is {mean:.1f} of at most {max_lag}")
    if is_judged and at.lag.masked_share > MASKED_SHARE:
        what.append(f"{share(at.lag.masked_share)} of generated tokens are masked for their lag")
    expired, total = at.outcomes.groups.get("expired", 0), sum(at.outcomes.groups.values())
    if expired >= EXPIRED_MIN and expired > EXPIRED_SHARE * total:
        what.append(f"{expired} of {total} groups expired")
    if what:
        yield RunWarning(
            "lag_high",
            ", ".join(what),
            f"fewer rollouts{_faster_trainer(at)} for fresher data; a higher dispatch.max_lag "
            "or shorter answers (sampling.tokens_max) if many tokens are masked",
        )


# Thresholds of the mismatch: Δ is the trainer's log-probability of a token minus the engine's.
# The standard deviation of |Δ| is about its mean, so over 256 compared tokens the mean is known to
# 1/√256 = 6 %.
TOKENS_MIN = 256
# The mean |Δ| with float32 everywhere: rounding alone stays below 1e-4 (vLLM: at most 5e-5).
EXACT_NATS = 1e-3
# The mean |Δ| with 16-bit values. bfloat16 has 8 significant bits: a logit of 16 is stored in steps
# of 0.06, so its mean error is 0.016, and that of log-probabilities about as much. The bound is
# three times that.
ROUNDED_NATS = 0.05
# The mean |Δ| per step of lag, for tokens of an older version than the trainer's: |Δ| includes the
# learning in between, 0.03 to 0.14 a step in the quickstart after a short warm-up. Wrong weights
# differ by several nats.
NEAR_NATS = 0.5
MISMATCH_ADVICE = (
    "likely causes, in this order: the engine's log-probabilities are not at sampling.temperature "
    "or are of a filtered distribution; it serves other weights than it reports (rollstream audit) "
    "or prefix-cache blocks of other weights; the output head has 16 bits on one side "
    "(rollouts.vllm.head_float32); see docs/explanation/learning.md"
)


def engine_mismatch(at: RunSnapshot) -> Iterator[RunWarning]:
    """A task whose tokens have log-probabilities in engine and trainer that differ, on average, by
    more than rounding under the same version (lag 0) or, if the task's newest step has none of lag
    0, by more than the training in between explains.
    """
    bound = EXACT_NATS if at.plan.is_float32 else ROUNDED_NATS
    for task, mismatch in at.mismatch.items():
        name = plain_text(task, 40)
        if mismatch.tokens >= TOKENS_MIN and mismatch.mean > bound:
            what = (
                f"engine and trainer are {mismatch.mean:.2g} nats apart on average (bound: "
                f"{bound:g}) for the same {count(mismatch.tokens)} tokens of task {name} under the "
                f"same version; KL {mismatch.kl:.2g}, largest {mismatch.largest:.2g}"
            )
        elif mismatch.near_lag is not None and mismatch.near_mean > NEAR_NATS * mismatch.near_lag:
            what = (
                f"engine and trainer are {mismatch.near_mean:.2g} nats apart on average for tokens "
                f"of task {name} at lag {mismatch.near_lag}, more than training explains (the last "
                "step had none of lag 0)"
            )
        else:
            continue
        yield RunWarning(f"mismatch/{name}", what, MISMATCH_ADVICE)


# The archive writes every record within `archive.roll_s` seconds of its append, so a record that
# has waited for three times as long shows that it is behind.
ARCHIVE_ROLLS = 3.0


def dead_letters(at: RunSnapshot) -> Iterator[RunWarning]:
    if not at.dead_letters:
        return
    counts = ", ".join(f"{count(letters.count)} of {t}" for t, letters in at.dead_letters.items())
    worst = max(at.dead_letters.values(), key=lambda letters: letters.count)
    reason = f"; the newest: {plain_text(worst.reason, 120)}" if worst.reason else ""
    yield RunWarning(
        "dead_letters",
        f"records that could not be decoded: {counts}{reason}",
        "rollstream tail dead shows bytes, position and reason; find the program that writes them",
    )


def unreadable_parts(at: RunSnapshot) -> Iterator[RunWarning]:
    # Even one part is a loss of records, or a damaged file of the archive.
    if at.holes:
        first, *others = at.holes
        more = f", and {plural(len(others), 'other part')}" if others else ""
        yield RunWarning(
            "unreadable_parts",
            f"a part of the log cannot be read: {plain_text(first, 160)}{more}",
            "rollstream audit RUN lists them all; restore the archive's files from a backup",
        )


def archive_behind(at: RunSnapshot) -> Iterator[RunWarning]:
    backlogs = {
        t: backlog
        for t, backlog in at.unarchived_s.items()
        if backlog[1] > ARCHIVE_ROLLS * at.plan.archive_roll_s
    }
    # A run that is resumed catches up with the records that it left.
    if backlogs and not at.is_starting:
        topic, (records, oldest_s) = max(backlogs.items(), key=lambda pair: pair[1][1])
        yield RunWarning(
            "archive_behind",
            f"the archive is behind: {count(records)} records of {topic} are not archived, the "
            f"oldest for {age(oldest_s)}",
            "check that the archive role runs (logs/archive.log) and that the store accepts "
            "writes; until it has caught up, the log is not truncated",
        )


def unverified_versions(at: RunSnapshot) -> Iterator[RunWarning]:
    wrong = [line for line in at.rollouts if line.is_alive() and not line.verified]
    if wrong:
        names = ", ".join(f"{shortened(line.name, 24)} (v{line.version})" for line in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        yield RunWarning(
            "unverified_versions",
            f"weights that were not verified, or differ from the announced ones: {names}{more}",
            "restart these rollouts: they fetch the version again and check every tensor's hash",
        )
