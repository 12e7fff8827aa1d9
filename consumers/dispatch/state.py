"""What dispatch knows, folded from topics; a new holder of the lease folds the same records and
knows the same.

Every `apply_*` is idempotent and, within an open group, independent of the order *between* topics:
attempts decide between orders, first completions between results. `admissions` is read before
`trajectories`, so a completion of an unknown group is late, not early (invariant 2).
"""

from dataclasses import dataclass, field

from streams.records import Address, Admitted, Assignment, Prompt, RolloutStatus, Version


@dataclass(frozen=True, slots=True)
class Order:
    """The newest order for a trajectory: who generates it, in which attempt, from which partial."""

    attempt: int
    rollout: str
    rollout_term: int
    moves: int
    version: Version
    at: Address | None = None
    """Where it lies in `assignments`; None until it is appended."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Newest partial of a trajectory's newest attempt, and the version of its last token; `first`
    is the oldest partial of the trajectory, whatever its attempt.
    """

    attempt: int
    at: Address
    version: Version | None
    first: Address


@dataclass(slots=True)
class OpenGroup:
    """An admitted group that is neither trained nor closed nor complete."""

    admitted: Admitted
    open: set[str]
    prompt: Prompt | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """An order that nobody waits for any more, because its group ended."""

    group: OpenGroup
    trajectory: str
    order: Order


@dataclass(slots=True)
class Seen:
    """A rollout's newest status and when dispatch saw it change, on dispatch's own monotonic clock.

    One that was only read back from before dispatch started is not `fresh`: it keeps its orders
    until it is silent for too long, and gets no new ones.
    """

    status: RolloutStatus
    at_s: float
    fresh: bool


@dataclass(slots=True)
class DispatchState:
    """Counts and open work; memory is bounded by what admission lets run."""

    admitted: int = 0
    closed: int = 0
    trained: int = 0
    version: Version = field(default_factory=lambda: Version(0, 0))
    next_group: int = 0
    groups: dict[int, OpenGroup] = field(default_factory=dict[int, OpenGroup])
    orders: dict[str, Order] = field(default_factory=dict[str, Order])
    chains: dict[str, Chain] = field(default_factory=dict[str, Chain])
    rollouts: dict[str, Seen] = field(default_factory=dict[str, Seen])
    completed: int = 0
    late: int = 0

    def apply_admitted(self, record: Admitted) -> None:
        self.admitted += 1
        self.next_group = max(self.next_group, record.group + 1)
        self.groups[record.group] = OpenGroup(record, set(record.trajectories))

    def apply_assignment(self, record: Assignment, at: Address | None = None) -> None:
        """The highest attempt is the order in force; a release ends it only for that attempt."""
        known = self.orders.get(record.trajectory)
        group = self.groups.get(record.group)
        if group is None or record.trajectory not in group.open:
            return
        if known is not None and record.attempt < known.attempt:
            return
        if record.kind == "release":
            self.orders.pop(record.trajectory, None)
            return
        self.orders[record.trajectory] = Order(
            record.attempt, record.rollout, record.rollout_term, record.moves, record.version, at
        )

    def apply_partial(
        self, group: int, trajectory: str, attempt: int, at: Address, version: Version | None
    ) -> None:
        """Only the newest attempt's chain is kept: writers never mix (the chain names its
        predecessors).
        """
        known = self.chains.get(trajectory)
        opened = self.groups.get(group)
        if opened is None or trajectory not in opened.open:
            return
        if known is None or attempt >= known.attempt:
            self.chains[trajectory] = Chain(attempt, at, version, known.first if known else at)

    def apply_completion(self, group: int, trajectory: str) -> None:
        """The first completion ends a trajectory; a second one, or one of a group that is not open,
        is late.
        """
        opened = self.groups.get(group)
        if opened is None or trajectory not in opened.open:
            self.late += 1
            return
        self.completed += 1
        opened.open.discard(trajectory)
        self.orders.pop(trajectory, None)
        self.chains.pop(trajectory, None)
        if not opened.open:
            del self.groups[group]

    def apply_taken(self, group: int) -> list[Released]:
        """The trainer took the group; returns the orders of trajectories that nobody waits for any
        more.
        """
        self.trained += 1
        return self._end(group)

    def apply_closed(self, group: int) -> list[Released]:
        """The trainer closed the group untrained; returns the orders that are void now."""
        self.closed += 1
        return self._end(group)

    def _end(self, group: int) -> list[Released]:
        opened = self.groups.pop(group, None)
        if opened is None:
            return []
        for trajectory in opened.open:
            self.chains.pop(trajectory, None)
        ended = [(t, self.orders.pop(t, None)) for t in sorted(opened.open)]
        return [Released(opened, t, order) for t, order in ended if order is not None]

    def apply_status(self, record: RolloutStatus, now_s: float, fresh: bool = True) -> None:
        """A lower term of a rollout is a zombie's; a restarted rollout holds nothing of its earlier
        term.
        """
        seen = self.rollouts.get(record.rollout)
        if seen is None or record.term >= seen.status.term:
            self.rollouts[record.rollout] = Seen(record, now_s, fresh)

    def forget_rollouts(self, silent_before_s: float) -> list[str]:
        """Drop rollouts silent for too long; their work is nobody's then (`recover.py`)."""
        silent = [name for name, seen in self.rollouts.items() if seen.at_s < silent_before_s]
        for name in silent:
            del self.rollouts[name]
        return silent

    def given(self) -> dict[str, int]:
        """Orders in force per live rollout and term."""
        counts: dict[str, int] = dict.fromkeys(self.rollouts, 0)
        for order in self.orders.values():
            seen = self.rollouts.get(order.rollout)
            if seen is not None and seen.status.term == order.rollout_term:
                counts[order.rollout] += 1
        return counts
