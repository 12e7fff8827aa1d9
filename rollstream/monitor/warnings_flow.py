"""Warns about a run's progress (overdue steps, starved processes, high lag), about its
data (unreadable records, a late archive, unverified weights) and about the mismatch of engine and
trainer (docs/explanation/learning.md lists the causes).

Each warning is one pure function of a `RunSnapshot`, the metrics of one moment; it yields nothing
for a healthy run. The text at each threshold holds its arithmetic. `concerns.py` lists all checks.
"""

from collections.abc import Iterator
from math import floor
from statistics import fmean

from rollstream.monitor.format import age, count, plain_text, plural, share, shortened
from rollstream.monitor.rollouts import RolloutSnapshot
from rollstream.monitor.snapshot import RunSnapshot, RunWarning
from rollstream.monitor.warnings_split import (
    STEPS_MIN,
    balance_of,
    more_rollouts,
    rollouts_needed,
    split_off,
)

STEP_TIMES, STEP_S = 5.0, 30.0
"""A step is overdue after five times the median step, and half a minute at least. The longest of
60 quickstart steps takes two medians, and a restart of the trainer about 10 s.
"""
FIRST_STEP_S = 600.0
"""The first step is overdue after the default deadline of a group (`dispatch.group_deadline_s`): a
single slow trajectory cannot explain a longer wait.
"""
IDLE_SHARE = 0.5
"""Above it rollouts have nothing to decode for more than half of the time."""
WAIT_SHARE = 0.5
"""Share of a step in which the trainer waits for trajectories. Above it the step could take half
the time.
"""
FULL_SHARE = 0.9
"""Share of the permitted open groups (`RunSettings.groups_max`); above it rollouts soon wait for
admissions.
"""
LAG_SHARE = 0.8
"""Share of `max_lag` that the mean lag may reach: closer to it the oldest tokens of each step are
masked.
"""
MASKED_SHARE = 0.05
"""Share of generated tokens that may be masked for their lag: one in twenty."""
EXPIRED_SHARE, EXPIRED_MIN = 0.02, 2
"""More than one group in fifty has expired, and at least two: a single one may be an outlier."""


def run_unreadable(at: RunSnapshot) -> Iterator[RunWarning]:
    """Warns if log or store cannot be read: what needs it has the values of the last read."""
    if at.trouble:
        yield RunWarning(
            "run_unreadable",
            plain_text(at.trouble, 400),
            "check that log and store answer from here (rollstream config RUN bus, store); values "
            "that need it are those of the last read",
        )


def step_overdue(at: RunSnapshot) -> Iterator[RunWarning]:
    """Warns if the last step ended long ago, compared with recent steps, or if the first step does
    not come.
    """
    if at.is_over or at.is_quiet or at.is_starting or at.step >= at.steps:
        return
    since_s, limit_s = at.pace.since_step_s, STEP_TIMES * (at.pace.step_s or 0.0)
    if at.trainer_age_s is not None and since_s is not None and at.trainer_age_s < since_s:
        since_s, limit_s = at.trainer_age_s, max(limit_s, FIRST_STEP_S)  # it loads and repeats
    if at.step and since_s is not None and at.pace.step_s is not None:
        if since_s > max(STEP_S, limit_s):
            usual = age(at.pace.step_s)
            yield RunWarning(
                "step_overdue",
                f"no step for {age(since_s)}; a step takes {usual} (median)",
                "see logs/trainer.log, and whether trajectories still come (rates, open groups)",
            )
    elif not at.step and at.version is not None and at.seconds > FIRST_STEP_S:
        yield RunWarning(
            "step_overdue",
            f"no first step after {age(at.seconds)}",
            "see logs/trainer.log and logs/rollout-*.log; fewer trainer.groups_per_step or "
            "shorter answers (sampling.tokens_max) make a first step come earlier",
        )


def rollouts_starved(at: RunSnapshot) -> Iterator[RunWarning]:
    """Warns if rollouts have nothing to decode most of the time. The advice depends on the cause:
    as many open groups as permitted, which wait for the trainer or for their rewards, no prompt, or
    slow assignments.
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
    elif 2 * sum(one.state in ("pulling", "draining") for one in _alive(at)) > len(_alive(at)):
        do = "they wait for new weights: see whether store or relay are slow (logs/rollout-*.log), "
        do += 'or set rollouts.on_update = "in_flight"'
    elif not at.queue.unread_prompts:
        do = "no prompt is waiting: see logs/prompts.log and whether the data set is exhausted"
    else:
        do = "see logs/dispatch.log; raise dispatch.queue_per_slot if assignments arrive slowly"
    yield RunWarning("rollouts_starved", what, do)


def _idle_share(at: RunSnapshot) -> float:
    """Returns the mean of the living rollouts; 0 where it cannot be judged."""
    alive = _alive(at)
    if at.is_over or at.step >= at.steps or not alive or at.pace.recent_steps < STEPS_MIN:
        return 0.0
    return fmean(one.idle_share for one in alive)


def _alive(at: RunSnapshot) -> list[RolloutSnapshot]:
    return [one for one in at.rollouts if one.is_alive() and one.state != "starting"]


def _needs_no_groups(at: RunSnapshot) -> bool:
    """Returns whether the open groups are all that the remaining steps need: at the end of a run
    rollouts rightly have nothing to do.
    """
    return at.queue.open_groups >= (at.steps - at.step) * at.plan.groups_per_step


def _faster_trainer(at: RunSnapshot) -> str:
    """Returns the part of an advice that makes the trainer faster; "" where nothing here does."""
    if at.plan.trainer_gpus is not None:
        return ", more trainer.processes on further GPUs"
    if at.machine is None:
        return ", more trainer.workers on idle cores"
    return ", more trainer.workers" if at.machine.spare_cores >= 1 else ""


def _groups_wait(at: RunSnapshot) -> bool:
    """Returns whether nearly all permitted groups are open: rollouts get no more."""
    return at.queue.open_groups >= FULL_SHARE * at.plan.groups_max()


def _trainer_waits(at: RunSnapshot) -> bool:
    # It waits and computes at the same time, so what its threads compute is no waiting.
    waiting = min(at.pace.wait_share, 1 - at.pace.busy_share / at.plan.trainer_threads)
    if at.pace.recent_steps < STEPS_MIN or waiting <= WAIT_SHARE:
        return False
    return at.queue.ready_groups < at.plan.groups_per_step


def trainer_starved(at: RunSnapshot) -> Iterator[RunWarning]:
    """Warns if the trainer of a living or finished run waits for trajectories most of the time and
    too few groups are ready, with the gain that more rollouts would give. If another split of the
    run's GPUs would help, `split_off` warns instead; if rollouts wait as well, for groups that are
    all open, more of them would not help, and `rollouts_starved` warns.
    """
    if not _trainer_waits(at) or next(split_off(at), None):
        return
    if (_idle_share(at) > IDLE_SHARE and _groups_wait(at)) or _needs_no_groups(at):
        return
    if not at.is_over and any(one.state == "starting" for one in at.rollouts):
        return  # more rollouts come already
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
    """Returns how many more rollouts the idle cores of this machine carry; None if another limit
    counts (GPUs). Where the machine is unknown, or the run is over, no number can be promised: 0.
    """
    if at.plan.rollout_cores is None:
        return None
    if at.machine is None or at.is_over:
        return 0
    return floor(at.machine.spare_cores / at.plan.rollout_cores + 0.1)


def queue_full(at: RunSnapshot) -> Iterator[RunWarning]:
    """Warns if nearly all permitted open groups are complete and wait for the trainer."""
    most = at.plan.groups_max()
    if not at.is_over and at.step < at.steps and at.queue.ready_groups >= FULL_SHARE * most:
        bound = "ready_groups_max" if at.plan.max_lag is None else "max_lag"
        yield RunWarning(
            "queue_full",
            f"{at.queue.ready_groups} complete groups wait for the trainer; "
            f"dispatch.{bound} allows {most} open ones",
            f"the trainer is the slower side: fewer rollouts{_faster_trainer(at)}",
        )


def lag_high(at: RunSnapshot) -> Iterator[RunWarning]:
    """Warns if the mean lag is close to `max_lag`, or if many tokens are masked or groups expired
    for their age.
    """
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
            f"fewer rollouts{_faster_trainer(at)} for fresher data; a higher dispatch.max_lag "
            "or shorter answers (sampling.tokens_max) if many tokens are masked",
        )


# Thresholds of the mismatch: Δ is the trainer's log-probability of a token minus the engine's.
TOKENS_MIN = 256
"""The fewest compared tokens. The standard deviation of |Δ| is about its mean, so over 256 tokens
the mean is known to 1/√256 = 6 %.
"""
EXACT_NATS = 1e-3
"""Bound of the mean |Δ| with float32 everywhere: rounding alone stays below 1e-4 (vLLM: at most
5e-5).
"""
ROUNDED_NATS = 0.05
"""Bound of the mean |Δ| with 16-bit values. bfloat16 has 8 significant bits: a logit of 16 is
stored in steps of 0.06, so its mean error is 0.016, and that of log-probabilities about as much.
The bound is three times that.
"""
NEAR_NATS = 0.5
"""Bound of the mean |Δ| per step of lag, for tokens of an older version than the trainer's: |Δ|
includes the learning in between, 0.03 to 0.14 a step in the quickstart after a short warm-up. Wrong
weights differ by several nats.
"""
MISMATCH_ADVICE = (
    "likely causes, in this order: the engine's log-probabilities are not at sampling.temperature "
    "or are of a filtered distribution; it serves other weights than it reports (rollstream audit) "
    "or prefix-cache blocks of other weights; the output head has 16 bits on one side "
    "(rollouts.vllm.head_float32); see docs/explanation/learning.md"
)


def engine_mismatch(at: RunSnapshot) -> Iterator[RunWarning]:
    """Warns of each task for whose tokens engine and trainer compute log-probabilities that differ,
    on average, by more than rounding under the same version (lag 0). If the task's newest step has
    no tokens of lag 0, it warns if they differ by more than the training in between explains.
    """
    bound = EXACT_NATS if at.plan.is_float32 else ROUNDED_NATS
    for task, found in at.mismatch.items():
        name = plain_text(task, 40)
        if found.tokens >= TOKENS_MIN and found.mean > bound:
            what = (
                f"engine and trainer are {found.mean:.2g} nats apart on average (bound: {bound:g}) "
                f"for the same {count(found.tokens)} tokens of task {name} under the same version; "
                f"KL {found.kl:.2g}, largest {found.largest:.2g}"
            )
        elif found.near_lag is not None and found.near_mean > NEAR_NATS * found.near_lag:
            what = (
                f"engine and trainer are {found.near_mean:.2g} nats apart on average for tokens of "
                f"task {name} at lag {found.near_lag}, more than training explains (the last step "
                "had none of lag 0)"
            )
        else:
            continue
        yield RunWarning(f"mismatch/{name}", what, MISMATCH_ADVICE)


ARCHIVE_ROLLS = 3.0
"""The archive writes every record within `archive.roll_s` seconds of its append, so a record that
has waited for three times as long shows that it is behind.
"""


def dead_letters(at: RunSnapshot) -> Iterator[RunWarning]:
    """Warns of records that could not be decoded and were moved to the topic `dead`."""
    if not at.dead_letters:
        return
    counts = ", ".join(f"{count(one.count)} of {t}" for t, one in at.dead_letters.items())
    worst = max(at.dead_letters.values(), key=lambda one: one.count)
    reason = f"; the newest: {plain_text(worst.reason, 120)}" if worst.reason else ""
    yield RunWarning(
        "dead_letters",
        f"records that could not be decoded: {counts}{reason}",
        "rollstream tail dead shows bytes, position and reason; find the program that writes them",
    )


def unreadable_parts(at: RunSnapshot) -> Iterator[RunWarning]:
    """Warns of even one unreadable part: records are lost, or a file of the archive is damaged."""
    if at.holes:
        first, *others = at.holes
        more = f", and {plural(len(others), 'other part')}" if others else ""
        yield RunWarning(
            "unreadable_parts",
            f"a part of the log cannot be read: {plain_text(first, 160)}{more}",
            "rollstream audit RUN lists them all; restore the archive's files from a backup",
        )


def archive_behind(at: RunSnapshot) -> Iterator[RunWarning]:
    """Warns if records wait too long for the archive; names the topic of the oldest one."""
    behind = {
        t: left
        for t, left in at.unarchived_s.items()
        if left[1] > ARCHIVE_ROLLS * at.plan.archive_roll_s
    }
    if behind and not at.is_starting:  # a run that is resumed catches up with what it left
        topic, (records, oldest_s) = max(behind.items(), key=lambda one: one[1][1])
        yield RunWarning(
            "archive_behind",
            f"the archive is behind: {count(records)} records of {topic} are not archived, the "
            f"oldest for {age(oldest_s)}",
            "check that the archive role runs (logs/archive.log) and that the store accepts "
            "writes; until it has caught up, the log is not truncated",
        )


def unverified_versions(at: RunSnapshot) -> Iterator[RunWarning]:
    """Warns of living rollouts with weights that were not verified or differ from the announced."""
    wrong = [one for one in at.rollouts if one.is_alive() and not one.verified]
    if wrong:
        names = ", ".join(f"{shortened(one.name, 24)} (v{one.version})" for one in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        yield RunWarning(
            "unverified_versions",
            f"weights that were not verified, or differ from the announced ones: {names}{more}",
            "restart these rollouts: they fetch the version again and check every tensor's hash",
        )
