"""The groups that the trainer may take, and those that ended untrained."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollstream.consumers.trainer.data.groups import ReceivedCompletion, TrainerGroup
from rollstream.consumers.trainer.data.prepare import PreparedGroup
from rollstream.consumers.trainer.data.selection import GroupCandidate
from rollstream.errors import ConfigurationError, EveryGroupDied
from rollstream.streams.records import GroupClosed
from rollstream.streams.values import AnnotationUsed, GroupMembers, SettingsSince

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A complete or overdue group. `settings` are those of its admission."""

    arrived: tuple[ReceivedCompletion, ...]
    annotations: tuple[AnnotationUsed, ...]
    prepared: PreparedGroup
    settings: SettingsSince | None = None

    def is_all_of(self, group: TrainerGroup) -> bool:
        """Whether no record of the group has arrived since this was made."""
        # A take states the positions read so far (`Take.read`) and must name every record of its
        # groups below them.
        annotation_count = sum(key[0] in group.arrived for key in group.annotations)
        return (len(self.arrived), len(self.annotations)) == (len(group.arrived), annotation_count)

    @property
    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.prepared.samples)


UNTRAINED_MAX = {"dead": (64, 8), "filtered": (1024, 32), "expired": (1024, 32)}
"""By ending: the trainer ends when so many groups in a row, or those of so many steps if that is
more, ended so. Where one group in a hundred can be trained, 1 024 others come in a row once in 30
000 times; of dead groups none is normal.
"""


@dataclass(slots=True)
class UntrainedGroups:
    """Groups that ended untrained since one could be trained, by ending."""

    counts: Counter[str] = field(default_factory=Counter[str])

    def check(
        self, closed: Sequence[GroupClosed], is_any_ready: bool, groups_per_step: int
    ) -> None:
        """Counts groups that are closed now; after too many in a row raises `EveryGroupDied`, or
        `ConfigurationError` if all are filtered: another start would filter them too.
        """
        if is_any_ready:
            self.counts.clear()
            return
        for record in closed:
            self.counts[record.reason] += 1
            count, (groups_max, steps) = self.counts[record.reason], UNTRAINED_MAX[record.reason]
            if count < max(groups_max, steps * groups_per_step):
                continue
            ended = f"{count} groups in a row ended {record.reason} and none could be trained"
            if record.reason == "filtered":
                raise ConfigurationError(
                    f"{ended}, the last one: {record.detail}. The rewards teach nothing: look at "
                    "some answers (`rollstream inspect`), mend the verifier or choose other "
                    "prompts; trainer.filter_equal_rewards = false trains such groups too"
                )
            raise EveryGroupDied(
                f"{ended}, the last one: {record.detail}. Mend the cause and start the same "
                "command again"
            )


def closed_record(
    number: int, group: TrainerGroup, prepared: PreparedGroup, step: int
) -> GroupClosed:
    assert prepared.ending, f"group {number} is to be trained"
    if group.is_complete():
        return GroupClosed(number, prepared.ending, prepared.detail, step)
    admitted = group.admitted
    finished = f"{len(group.arrived)} of {len(admitted.trajectories)} finished"
    detail = f"deadline of {admitted.deadline_s:g} s passed, {finished}; {prepared.detail}"
    log.warning("group %d expired: %s", number, detail)
    return GroupClosed(number, "expired", detail, step)


def candidate_of(ready: ReadyGroup) -> GroupCandidate:
    versions = [span.version.number for s in ready.prepared.samples for span in s.spans]
    return GroupCandidate(ready.prepared.group, min(versions))


def members_of(ready: ReadyGroup) -> GroupMembers:
    return GroupMembers(ready.prepared.group, tuple(a.member for a in ready.arrived))
