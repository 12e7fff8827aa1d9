"""Warnings about the training of a run, each one pure function of a `RunSnapshot`."""

from collections import Counter
from collections.abc import Iterator

from rollstream.look.monitor.failure_causes import failure_cause
from rollstream.look.monitor.format import age, count, plain_text, share
from rollstream.look.monitor.snapshot import RunSnapshot, RunWarning

# Over 16 groups a share of 0.5 has a standard deviation of 0.13; fewer are not judged.
GROUPS_MIN = 16
# Groups with equal rewards. At accuracy p, n samples have equal rewards with probability p^n + (1 −
# p)^n: for n = 8 that is 0.27 at p = 0.85, 0.66 at 0.95, and above 0.9 only where p is above 0.987
# or below 0.013.
EQUAL_SHARE = 0.9
# Above it more than half of the generated tokens are unused, so a step takes more than twice the
# tokens.
FILTERED_SHARE = 0.5
# Steps with the same mean reward of 0 or 1. If the true mean is 0.001, 1 920 samples (ten steps of
# the quickstart) are all 0 with probability 0.999^1920 = 0.15; if it is larger, hardly ever.
CONSTANT_STEPS = 10
# Nearly every third answer is cut; 64 samples separate 0.3 from 0.15 by 2.5 standard deviations.
CUT_SHARE, CUT_MIN = 0.3, 64
# One in a hundred and at least two deaths hint at an unintended crash of a reward function.
DEAD_SHARE, DEAD_MIN = 0.01, 2
# One annotation in a hundred, and at least two, came after the end of their group: wasted work.
LATE_SHARE, LATE_MIN = 0.01, 2
# Of its deadline, after which a complete group that waits for an annotation may miss it.
UNSCORED_SHARE = 0.5


def equal_rewards(at: RunSnapshot) -> Iterator[RunWarning]:
    for task, figures in at.tasks.items():
        if figures.groups < GROUPS_MIN or figures.equal < EQUAL_SHARE * figures.groups:
            continue
        # If all rewards of a group are equal, all its advantages are zero.
        part = "all" if figures.equal == figures.groups else str(figures.equal)
        name = plain_text(task, 40)
        yield RunWarning(
            f"equal_rewards/{name}",
            f"rewards are equal within {part} of the last {figures.groups} groups of task {name} "
            f"(mean {figures.reward_mean:.3g}): these groups carry no gradient",
            "use prompts that are neither too easy nor too hard for the model, or fix the "
            "reward; trainer.filter_equal_rewards leaves such groups out",
        )


def constant_reward(at: RunSnapshot) -> Iterator[RunWarning]:
    rewards = at.rewards
    if not rewards or rewards[-1] not in (0.0, 1.0):
        return
    steps = next(
        (n for n, reward in enumerate(reversed(rewards)) if reward != rewards[-1]), len(rewards)
    )
    if steps >= CONSTANT_STEPS:
        solved = rewards[-1] == 1.0
        yield RunWarning(
            "constant_reward",
            f"every reward has been exactly {rewards[-1]:g} for {steps} steps",
            "the task is solved: stop, or use harder prompts"
            if solved
            else "compare some answers (rollstream tail trajectories) with what the reward "
            "expects; warm the model up, or use easier prompts",
        )


def filtered_groups(at: RunSnapshot) -> Iterator[RunWarning]:
    filtered, trained = at.outcomes.groups.get("filtered", 0), at.outcomes.groups.get("trained", 0)
    total = filtered + trained
    if total >= GROUPS_MIN and filtered > FILTERED_SHARE * total:
        yield RunWarning(
            "filtered_groups",
            f"{share(filtered / total)} of groups are filtered because their rewards are all equal",
            "use prompts of medium difficulty, or more samples per group "
            "(trainer.samples_per_group)",
        )


def cut_trajectories(at: RunSnapshot) -> Iterator[RunWarning]:
    cut, ended = at.outcomes.trajectories.get("length", 0), at.outcomes.trajectories.get("stop", 0)
    total = cut + ended
    if total >= CUT_MIN and cut > CUT_SHARE * total:
        limit, also = f"{at.plan.tokens_max} tokens", ""
        if at.plan.has_agents:
            limit, also = "a limit of tokens", ", or the max_tokens that the program asks for"
        yield RunWarning(
            "cut_trajectories",
            f"{share(cut / total)} of trajectories are cut at {limit}",
            f"raise sampling.tokens_max (and rollouts.context_max){also}, or reward shorter "
            "answers",
        )


def dead_trajectories(at: RunSnapshot) -> Iterator[RunWarning]:
    names = ("stop", "length", "dead")
    total = sum(at.outcomes.trajectories.get(name, 0) for name in names)
    dead = at.outcomes.trajectories.get("dead", 0)
    if dead >= DEAD_MIN and dead >= DEAD_SHARE * total:
        reason, times = (
            at.outcomes.dead_reasons[0] if at.outcomes.dead_reasons else ("no reason given", dead)
        )
        often = f", {times} times" if times < dead else ""
        causes = Counter[str]()
        for why, number in at.outcomes.dead_reasons:
            causes[failure_cause(why)] += number
        by_cause = ", ".join(f"{number} {cause}" for cause, number in causes.most_common(4))
        by_cause = f" ({by_cause})" if len(causes) > 1 else ""
        if at.outcomes.dead_tasks:
            worst = at.outcomes.dead_tasks[:3]
            by_cause += ", of " + ", ".join(f"{plain_text(t, 40)} {n}" for t, n in worst)
        yield RunWarning(
            "dead_trajectories",
            f"{dead} of the last {count(total)} trajectories died{by_cause}; most frequent "
            f"reason{often}: {plain_text(reason, 120) or 'no reason given'}",
            "fix the reward, task or environment that raises it; logs/rollout-*.log name each "
            "trajectory",
        )


def unscored_groups(at: RunSnapshot) -> Iterator[RunWarning]:
    waited_s, deadline_s = at.queue.unscored_group_s, at.plan.group_deadline_s
    if waited_s is not None and at.trainer_age_s is not None:
        # A deadline counts since the trainer's start.
        waited_s = min(waited_s, at.trainer_age_s)
    if waited_s is not None and waited_s > UNSCORED_SHARE * deadline_s and not at.is_over:
        yield RunWarning(
            "unscored_groups",
            f"a complete group has waited {age(waited_s)} for its annotations "
            f"(its deadline: {age(deadline_s)})",
            "check that a scorer runs and writes the annotations of trainer.reward_terms and "
            "trainer.annotations (rollstream tail annotations), or add scorers",
        )


def late_annotations(at: RunSnapshot) -> Iterator[RunWarning]:
    late, total = at.outcomes.annotations_late, at.outcomes.annotations
    if late >= LATE_MIN and late > LATE_SHARE * total:
        yield RunWarning(
            "late_annotations",
            f"{late} of {count(total)} annotations came after their group had ended",
            "add scorers, make them faster, or raise dispatch.group_deadline_s",
        )


def skipped_updates(at: RunSnapshot) -> Iterator[RunWarning]:
    # Even one counts: its groups are trained without effect.
    if at.skipped:
        yield RunWarning(
            "skipped_updates",
            f"{at.skipped} of the last steps skipped an update: a gradient was not finite, or no "
            "token of the update could be trained",
            "check loss and gradient_norm of those steps (metrics/trainer.jsonl) and the size of "
            "the rewards; try a lower trainer.lr",
        )


def refused_trajectories(at: RunSnapshot) -> Iterator[RunWarning]:
    """Warns of trajectories that the trainer refused as untrainable (invariant 12)."""
    if at.refused:
        kinds = ", ".join(f"{number} for {kind}" for kind, number in sorted(at.refused.items()))
        yield RunWarning(
            "refused_trajectories",
            f"the trainer refused trajectories that cannot be trained: {kinds}",
            "find the program that writes them: docs/explanation/learning.md explains each kind, "
            "the details "
            "of dead groups name some of them (rollstream tail ledger)",
        )


def skipped_rows(at: RunSnapshot) -> Iterator[RunWarning]:
    for record in at.skipped_rows:
        first = f" (first: {record.named[0]})" if record.named else ""
        yield RunWarning(
            "skipped_rows",
            f"{record.skipped} of {record.rows} rows of {record.data_set} are skipped{first}",
            "mend these rows for the next run; rollstream audit names them",
        )


def foreign_records(at: RunSnapshot) -> Iterator[RunWarning]:
    if at.foreign:
        topics = ", ".join(f"{number} in {topic}" for topic, number in sorted(at.foreign.items()))
        yield RunWarning(
            "foreign_records",
            f"trainer and dispatch refused readable records that no role of this run writes: "
            f"{topics}",
            "find the program that writes values out of bounds or under a name or term that it "
            "never took (rollstream tail TOPIC), and restrict who may write (docs/reference/"
            "kafka.md, ACLs)",
        )
