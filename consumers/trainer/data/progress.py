"""Progress of one update: which groups it has taken and which of their samples are used. Live
training and the repetition after a crash share it.

An update is complete when it has all its groups and every trainable sample of them was in a take.
Both can be derived from the ledger, so the successor of a trainer that died in the middle of a step
continues exactly where its takes end.
"""

from dataclasses import dataclass, field


def groups_of_update(update: int, groups_per_step: int, updates_per_step: int) -> int:
    """Number of groups of one update: a step's groups are divided as evenly as possible, larger
    shares first.
    """
    share, rest = divmod(groups_per_step, updates_per_step)
    return share + (update < rest)


@dataclass(slots=True)
class UpdateProgress:
    """One update of one step."""

    step: int
    update: int
    groups_needed: int
    groups: set[int] = field(default_factory=set[int])
    pending: dict[str, int] = field(default_factory=dict[str, int])
    micro_batches: int = 0

    @property
    def version(self) -> int:
        """Number of the version that is trained from; the step produces version `step`."""
        return self.step - 1

    @property
    def groups_left(self) -> int:
        return max(0, self.groups_needed - len(self.groups))

    def take_group(self, group: int, trainable: list[str]) -> None:
        """Add a group to this update; its trainable samples are pending."""
        assert group not in self.groups, f"group {group} was taken twice in step {self.step}"
        self.groups.add(group)
        self.pending.update(dict.fromkeys(trainable, group))

    def use(self, trajectories: list[str]) -> None:
        """Count one take that uses these pending samples (invariant 2: each at most once)."""
        for trajectory in trajectories:
            del self.pending[trajectory]
        self.micro_batches += 1

    def skip_take(self) -> None:
        """Count one superseded take: it keeps its number, and later takes use its samples."""
        self.micro_batches += 1

    def is_complete(self) -> bool:
        return self.groups_left == 0 and not self.pending


def worth_taking(groups_left: int, groups_ready: int, tokens_ready: int, tokens_full: int) -> bool:
    """Whether to take the ready groups now: they complete the update or fill a micro-batch.

    A step starts before its last group is ready, but small micro-batches waste arithmetic.
    """
    return groups_ready > 0 and (groups_ready >= groups_left or tokens_ready >= tokens_full)
