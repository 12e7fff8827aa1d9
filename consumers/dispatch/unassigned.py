"""Open trajectories that no rollout generates, split into parts that continue in the same way, and
the order in which they are assigned. Pure (invariant 9).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollstream.consumers.dispatch.assignments import (
    Continuation,
    continuations,
    held_versions,
    unassigned_trajectories,
)
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.state import DispatchState, UnfinishedGroup
from rollstream.streams.records import Prompt
from rollstream.streams.values import Version


@dataclass(frozen=True, slots=True)
class UnassignedSamples:
    """Unassigned trajectories of one group that continue in the same way; `mean` is the expected
    length of one in tokens, 0 when unknown.
    """

    group: UnfinishedGroup
    prompt: Prompt
    trajectories: tuple[str, ...]
    how: Mapping[str, Continuation]
    mean: float

    @property
    def kind(self) -> str:
        return self.how[self.trajectories[0]].kind

    @property
    def version(self) -> Version | None:
        return self.how[self.trajectories[0]].version

    def is_probe(self) -> bool:
        """Whether this is the first sample of a group of unknown length."""
        return not self.mean and self.trajectories == self.group.admitted.trajectories[:1]

    def without(self, settled: set[str]) -> "UnassignedSamples":
        return replace(self, trajectories=tuple(t for t in self.trajectories if t not in settled))


def find_unassigned(
    state: DispatchState, lengths: LengthHistory, keep_version: bool
) -> Iterator[UnassignedSamples]:
    """All unassigned trajectories, oldest wave first; those of a group whose prompt was not read
    yet are left out.
    """
    found = unassigned_trajectories(state)
    held = held_versions(state) if found and keep_version else set[Version]()
    for trajectories in found:
        group = state.group_of(trajectories[0])
        if group.prompt is None:
            continue
        how = continuations(state, trajectories, keep_version, held)
        mean = lengths.mean(group.prompt, group.finished)
        for kind, version in sorted({(h.kind, h.version) for h in how.values()}, key=str):
            alike = [t for t in trajectories if (how[t].kind, how[t].version) == (kind, version)]
            yield UnassignedSamples(group, group.prompt, tuple(alike), how, mean)


def in_start_order(starts: Sequence[UnassignedSamples], room: int) -> list[UnassignedSamples]:
    """Oldest wave first, within it the longest first, so that the long tail starts early. When not
    all fit, one probe of each group of unknown length comes before that, as in Seer; an unknown
    length counts as the limit.
    """
    parts = list(starts)
    if room < sum(len(one.trajectories) for one in starts):
        parts = [part for one in starts for part in _split_off_probe(one)]

    def turn(one: UnassignedSamples) -> tuple[int, bool, float, int]:
        length = one.mean or one.prompt.sampling.tokens_max
        return one.group.admitted.wave, not one.is_probe(), -length, one.prompt.group

    return sorted(parts, key=turn)


def _split_off_probe(one: UnassignedSamples) -> list[UnassignedSamples]:
    probe = replace(one, trajectories=one.trajectories[:1])
    if not probe.is_probe() or len(one.trajectories) == 1:
        return [one]
    return [probe, replace(one, trajectories=one.trajectories[1:])]
