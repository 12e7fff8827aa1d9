"""Every concern of a run: a problem that a person should know of (`CONCERNS`).

It has four faces under one name, which a test compares: its check, whose warning the views show;
the series `rollstream_concern`; its alert in `deploy/alerts.yml`, generated from this list; and its
entry in docs/reference/runbook-concerns.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rollstream.look.monitor import (
    warnings_flow as flow,
    warnings_learning as learning,
    warnings_processes as processes,
)
from rollstream.look.monitor.snapshot import RunSnapshot, RunWarning
from rollstream.look.monitor.warnings_split import split_off
from rollstream.metric_values import MetricValue, MetricValues


@dataclass(frozen=True, slots=True)
class Concern:
    """`name` is the kind of the warnings of `check`, or its part before `/` (a check that warns by
    task). `meaning` states in one sentence what it means that the concern lasts. `severity` `page`
    calls a person now: the run stands still or trains on wrong data; `ticket` on the next working
    day.
    """

    name: str
    severity: Literal["page", "ticket"]
    check: Callable[[RunSnapshot], Iterator[RunWarning]]
    meaning: str


# The most urgent first: no progress, wrong data, nothing to learn from, slowness.
CONCERNS = (
    Concern(
        "run_unreadable",
        "page",
        flow.run_unreadable,
        "the process that observes the run cannot read its log or its store",
    ),
    Concern(
        "run_silent",
        "page",
        processes.run_silent,
        "no process writes records although the run is not over",
    ),
    Concern(
        "run_failed",
        "page",
        processes.run_failed,
        "a process died so often, or refused to start, that the supervisor ended the run",
    ),
    Concern(
        "step_overdue",
        "page",
        flow.step_overdue,
        "the next step takes five times as long as a step usually does, or the first one never "
        "comes",
    ),
    Concern(
        "rollouts_silent",
        "ticket",
        processes.rollouts_silent,
        "rollouts send no heartbeat, so dispatch has given their trajectories to others",
    ),
    Concern(
        "roles_dying",
        "page",
        processes.roles_dying,
        "processes of the run die again and again, and their restarts do not help",
    ),
    Concern(
        "unverified_versions",
        "page",
        flow.unverified_versions,
        "rollouts generate with weights that are not the announced ones",
    ),
    Concern(
        "unreadable_parts",
        "page",
        flow.unreadable_parts,
        "records of the log are lost, or a file of the archive is damaged",
    ),
    Concern(
        "dead_letters",
        "ticket",
        flow.dead_letters,
        "a program writes records that no reader can decode",
    ),
    Concern(
        "archive_behind",
        "ticket",
        flow.archive_behind,
        "records wait too long for the archive, and meanwhile the log is not truncated",
    ),
    Concern(
        "mismatch",
        "page",
        flow.engine_mismatch,
        "engine and trainer compute different log-probabilities for the same tokens and weights",
    ),
    Concern(
        "skipped_updates",
        "ticket",
        learning.skipped_updates,
        "updates of the weights were skipped, because a gradient was not finite or no token could "
        "be trained",
    ),
    Concern(
        "refused_trajectories",
        "ticket",
        learning.refused_trajectories,
        "the trainer refuses trajectories with values out of bounds",
    ),
    Concern(
        "skipped_rows",
        "ticket",
        learning.skipped_rows,
        "some rows of the data set cannot be read, rendered or are too long, and are not asked",
    ),
    Concern(
        "foreign_records",
        "ticket",
        learning.foreign_records,
        "a program that is no role of this run writes to its log",
    ),
    Concern(
        "equal_rewards",
        "ticket",
        learning.equal_rewards,
        "the rewards within nearly every group of a task are equal, so these groups teach nothing",
    ),
    Concern(
        "constant_reward",
        "ticket",
        learning.constant_reward,
        "every reward has been exactly 0, or exactly 1, for ten steps",
    ),
    Concern(
        "filtered_groups",
        "ticket",
        learning.filtered_groups,
        "most groups are filtered for their equal rewards, so most tokens are generated in vain",
    ),
    Concern(
        "dead_trajectories",
        "ticket",
        learning.dead_trajectories,
        "trajectories end without a reward",
    ),
    Concern(
        "cut_trajectories",
        "ticket",
        learning.cut_trajectories,
        "nearly every third answer is cut at its maximum length",
    ),
    Concern(
        "unscored_groups",
        "ticket",
        learning.unscored_groups,
        "a complete group waits for its annotations and may miss its deadline",
    ),
    Concern(
        "late_annotations",
        "ticket",
        learning.late_annotations,
        "annotations come after their group has ended, where they have no effect",
    ),
    Concern(
        "split_off",
        "ticket",
        split_off,
        "the same GPUs would train faster if they were split otherwise between rollouts and "
        "trainer",
    ),
    Concern(
        "trainer_starved",
        "ticket",
        flow.trainer_starved,
        "the trainer waits for trajectories more than half of the time",
    ),
    Concern(
        "rollouts_starved",
        "ticket",
        flow.rollouts_starved,
        "rollouts have nothing to generate more than half of the time",
    ),
    Concern(
        "queue_full",
        "ticket",
        flow.queue_full,
        "nearly all groups that may be open are complete and wait for the trainer",
    ),
    Concern(
        "lag_high",
        "ticket",
        flow.lag_high,
        "what is trained is nearly as old as `dispatch.max_lag` permits, or older and dropped",
    ),
)


def warnings_of(at: RunSnapshot) -> tuple[RunWarning, ...]:
    return tuple(warning for concern in CONCERNS for warning in concern.check(at))


def concern_of(warning: RunWarning) -> str:
    return warning.kind.partition("/")[0]


def observed_values(at: RunSnapshot) -> MetricValues:
    """Returns the observed values of the whole run, at a snapshot that has its warnings
    (`concerns`).
    """
    lasting = {concern_of(warning) for warning in at.concerns}
    values: dict[str, MetricValue] = {
        # A concern that has ended is 0, so that its alert ends.
        "concern": {concern.name: concern.name in lasting for concern in CONCERNS},
        "run_step": at.step,
        "run_steps_wanted": at.steps,
        "run_over": at.is_over,
        "run_restarts_total": at.restarts,
        "run_archive_age_seconds": max((age for _, age in at.unarchived_s.values()), default=0.0),
        "run_archive_roll_seconds": at.plan.archive_roll_s,
    }
    if at.pace.since_step_s is not None:
        values["run_step_age_seconds"] = at.pace.since_step_s
    return values
