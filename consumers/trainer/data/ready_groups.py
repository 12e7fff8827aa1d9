"""Holds a group that the trainer may take (`ReadyGroup`), and makes of it what the choice of groups
and the ledger need.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rollstream.consumers.trainer.data.groups import ReceivedCompletion, TrainerGroup
from rollstream.consumers.trainer.data.prepare import PreparedGroup
from rollstream.consumers.trainer.data.selection import GroupCandidate
from rollstream.errors import EveryGroupDied
from rollstream.streams.records import GroupClosed
from rollstream.streams.values import AnnotationUsed, GroupMembers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """Holds a group that is complete or overdue (past its deadline): the completions that arrived,
    the annotations used, and the samples that `prepare_group` made of them.
    """

    arrived: tuple[ReceivedCompletion, ...]
    annotations: tuple[AnnotationUsed, ...]
    prepared: PreparedGroup

    def is_all_of(self, group: TrainerGroup) -> bool:
        """Whether no record of the group has arrived since this was made. If one has, the group is
        prepared again: a take states the positions read so far (`Take.read`) and must name every
        record of its groups below them.
        """
        noted = sum(key[0] in group.arrived for key in group.annotations)
        return (len(self.arrived), len(self.annotations)) == (len(group.arrived), noted)

    @property
    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.prepared.samples)


DEAD_MIN, DEAD_STEPS = 64, 8
"""The trainer ends when so many groups in a row ended dead, or those of so many steps, if that is
more.
"""


@dataclass(slots=True)
class DeadGroups:
    """Counts the groups that ended dead since one could be trained."""

    count: int = 0

    def check(
        self, closed: Sequence[GroupClosed], is_any_ready: bool, groups_per_step: int
    ) -> None:
        """Count groups that are closed now. Raises `EveryGroupDied` after too many in a row."""
        dead = [one for one in closed if one.reason == "dead"]
        self.count = 0 if is_any_ready else self.count + len(dead)
        if dead and self.count >= max(DEAD_MIN, DEAD_STEPS * groups_per_step):
            raise EveryGroupDied(
                f"{self.count} groups in a row ended dead and none could be trained, the last one: "
                f"{dead[-1].detail}. Mend the cause and start the same command again"
            )


def closed_record(
    number: int, group: TrainerGroup, prepared: PreparedGroup, step: int
) -> GroupClosed:
    """Returns the ledger record of a group that ends untrained."""
    assert prepared.ending, f"group {number} is to be trained"
    if group.is_complete():
        return GroupClosed(number, prepared.ending, prepared.detail, step)
    admitted = group.admitted
    finished = f"{len(group.arrived)} of {len(admitted.trajectories)} finished"
    detail = f"deadline of {admitted.deadline_s:g} s passed, {finished}; {prepared.detail}"
    log.warning("group %d expired: %s", number, detail)
    return GroupClosed(number, "expired", detail, step)


def candidate_of(ready: ReadyGroup) -> GroupCandidate:
    """Returns what the choice of groups needs to know of the group."""
    versions = [span.version.number for s in ready.prepared.samples for span in s.spans]
    return GroupCandidate(ready.prepared.group, min(versions))


def members_of(ready: ReadyGroup) -> GroupMembers:
    """Returns the group as a take names it."""
    return GroupMembers(ready.prepared.group, tuple(a.member for a in ready.arrived))
