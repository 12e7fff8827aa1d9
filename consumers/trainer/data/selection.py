"""Selects the data of an optimiser update: which complete groups come first, when they are taken,
and how samples are packed into micro-batches. Pure (invariant 9).
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from rollstream.consumers.trainer.data.sample import Sample
from rollstream.errors import ConfigurationError
from rollstream.import_path import find_callable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupCandidate:
    """`oldest_version` is the smallest version number of its spans."""

    group: int
    oldest_version: int


GroupChoice = Callable[[Sequence[GroupCandidate], int], Sequence[int]]
"""(candidates, most groups) → group numbers, in the order of training."""


def oldest(candidates: Sequence[GroupCandidate], groups: int) -> Sequence[int]:
    """Chooses by smallest `oldest_version`, then by group number: no group waits longer than
    necessary, so lag stays small.
    """
    ordered = sorted(candidates, key=lambda c: (c.oldest_version, c.group))
    return [c.group for c in ordered[:groups]]


def freshest(candidates: Sequence[GroupCandidate], groups: int) -> Sequence[int]:
    """Chooses by largest `oldest_version`, then by group number; old groups may expire."""
    ordered = sorted(candidates, key=lambda c: (-c.oldest_version, c.group))
    return [c.group for c in ordered[:groups]]


BUILT_IN: dict[str, GroupChoice] = {"oldest": oldest, "freshest": freshest}


def load_choice(name: str) -> GroupChoice:
    """The rule that `trainer.choose` names. Raises `ConfigurationError` if a user's function cannot
    be imported or called, or returns other groups than the offered ones, too many, or one twice.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ConfigurationError(
            f"trainer.choose: {name!r} is neither of {', '.join(BUILT_IN)} nor 'module:function'"
        )
    return _checked(cast(Callable[..., Iterable[int]], find_callable(name, "trainer.choose")), name)


def _checked(rule: Callable[..., Iterable[int]], name: str) -> GroupChoice:
    def choose(candidates: Sequence[GroupCandidate], groups: int) -> Sequence[int]:
        chosen = list(rule(candidates, groups))
        offered = {c.group for c in candidates}
        if len(chosen) > groups or len(set(chosen)) < len(chosen) or not offered.issuperset(chosen):
            raise ConfigurationError(
                f"trainer.choose: {name!r} returned {chosen}; it must return at most {groups} "
                "different groups out of those offered"
            )
        return chosen

    return choose


def groups_of_update(update: int, groups_per_step: int, updates_per_step: int) -> int:
    """The groups of update `update` (from 0): as even as possible, larger shares first."""
    share, rest = divmod(groups_per_step, updates_per_step)
    return share + (update < rest)


@dataclass(slots=True)
class UpdateProgress:
    """One update of one step: its `groups`, and their samples that no take has used yet (`pending`:
    trajectory → group). It is complete when it has all its groups and every trainable sample of
    them was in a take.
    """

    # Both follow from the ledger, so the successor of a trainer that died within a step continues
    # exactly after the last recorded take.
    step: int
    update: int
    groups_needed: int
    groups: set[int] = field(default_factory=set[int])
    pending: dict[str, int] = field(default_factory=dict[str, int])
    micro_batches: int = 0
    """The update's takes so far; the next one's number."""

    @property
    def version(self) -> int:
        return self.step - 1

    @property
    def groups_left(self) -> int:
        return max(0, self.groups_needed - len(self.groups))

    def take_group(self, group: int, trainable: list[str]) -> None:
        """Its `trainable` samples (trajectories) become pending."""
        assert group not in self.groups, f"group {group} was taken twice in step {self.step}"
        self.groups.add(group)
        self.pending.update(dict.fromkeys(trainable, group))

    def use(self, trajectories: list[str]) -> None:
        """Counts a take of these pending samples (invariant 2: each at most once)."""
        for trajectory in trajectories:
            del self.pending[trajectory]
        self.micro_batches += 1

    def skip_take(self) -> None:
        """Counts a recorded take that trains nothing in its repetition: it is superseded (invariant
        12), or a changed rule drops its samples.
        """
        # It keeps its number. Later takes use its samples, unless their group ended dead with it.
        self.micro_batches += 1

    def is_complete(self) -> bool:
        return self.groups_left == 0 and not self.pending


def worth_taking(groups_left: int, groups_ready: int, tokens_ready: int, tokens_full: int) -> bool:
    """Take now: the ready groups complete the update, or their `tokens_ready` fill a micro-batch of
    `tokens_full` tokens.
    """
    # An update starts before its last group is ready, but small micro-batches waste arithmetic.
    return groups_ready > 0 and (groups_ready >= groups_left or tokens_ready >= tokens_full)


NO_ANNOTATION_S = 30.0  # wait without an annotation before a warning, and between two warnings


@dataclass(slots=True)
class AnnotationWatch:
    """Warns when finished groups wait for annotations (`names`) and none arrives: they close at
    their deadline, by default after minutes.
    """

    # `quiet_since_s`: the last annotation, the start of the wait or the last warning, the latest of
    # them; 0 before the first call.
    names: Sequence[str]
    quiet_since_s: float = 0.0

    def check(self, waiting: int, annotated_s: float, now_s: float) -> bool:
        """Logs a due warning and returns whether it did. `waiting` finished groups lack
        annotations, the last one read at `annotated_s`.
        """
        if not waiting or not self.quiet_since_s:
            self.quiet_since_s = now_s
        self.quiet_since_s = max(self.quiet_since_s, annotated_s)
        if now_s - self.quiet_since_s < NO_ANNOTATION_S:
            return False
        log.warning(
            "%d finished groups wait for annotations (%s), and none came for %g s; is a scorer "
            "running? (`rollstream score CONFIG`, or scoring.count) Each group is closed at its "
            "deadline",
            waiting,
            ", ".join(self.names),
            NO_ANNOTATION_S,
        )
        self.quiet_since_s = now_s
        return True


def pack_micro_batches(samples: Sequence[Sample], tokens_max: int) -> list[tuple[Sample, ...]]:
    """Each sample is in one micro-batch of at most `tokens_max` tokens; a longer sample has its
    own. The order of `samples` does not matter.
    """
    if not samples:
        return []
    # Longest first, so that neighbours have about equal lengths.
    ordered = sorted(samples, key=lambda s: (-len(s), s.trajectory))
    total = sum(len(s) for s in ordered)
    # Micro-batches of about equal tokens, so that parallel workers finish together.
    share = total / -(-total // tokens_max)
    batches: list[list[Sample]] = [[]]
    tokens = before = 0
    for sample in ordered:
        is_full = tokens + len(sample) > tokens_max or before + tokens >= share * len(batches)
        if batches[-1] and is_full:
            batches.append([])
            before, tokens = before + tokens, 0
        batches[-1].append(sample)
        tokens += len(sample)
    return [tuple(batch) for batch in batches]
