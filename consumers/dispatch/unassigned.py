"""The open trajectories that no rollout generates, and their order, as pure functions (invariant
9).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollstream.consumers.dispatch.assignments import (
    Continuation,
    continuations,
    held_versions,
    unassigned_trajectories,
)
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.state import (
    DispatchState,
    UnfinishedGroup,
)
from rollstream.streams.records import Prompt
from rollstream.streams.values import Version


@dataclass(frozen=True, slots=True)
class UnassignedSamples:
    """The unassigned samples of one group; all start, or all resume under the same version. `mean`
    is the expected length in tokens, 0 if unknown.
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
        """Whether these are only the first sample of a group of unknown length, whose length
        predicts the others'.
        """
        return not self.mean and self.trajectories == self.group.admitted.trajectories[:1]

    def without(self, settled: set[str]) -> "UnassignedSamples":
        return replace(self, trajectories=tuple(t for t in self.trajectories if t not in settled))


def find_unassigned(
    state: DispatchState,
    lengths: LengthHistory,
    keep_version: bool,
    is_loadable: Callable[[Version], bool] | None = None,
) -> Iterator[UnassignedSamples]:
    """Yields all whose prompt was read, oldest wave first. `is_loadable` is for runs whose rollouts
    serve several versions side by side (adapters), else None: any rollout can load a version for
    which it returns True.
    """
    unassigned = unassigned_trajectories(state)
    resumable = held_versions(state) if unassigned and keep_version else set[Version]()
    if is_loadable is not None:
        resumable |= {
            version
            for version in _chain_versions(state, unassigned) - resumable
            if is_loadable(version)
        }
    for trajectories in unassigned:
        group = state.group_of(trajectories[0])
        if group.prompt is None:
            continue
        how = continuations(state, trajectories, keep_version, resumable)
        mean = lengths.mean(group.prompt, group.finished)
        for kind, version in sorted({(h.kind, h.version) for h in how.values()}, key=str):
            alike = [t for t in trajectories if (how[t].kind, how[t].version) == (kind, version)]
            yield UnassignedSamples(group, group.prompt, tuple(alike), how, mean)


def _chain_versions(state: DispatchState, unassigned: Sequence[Sequence[str]]) -> set[Version]:
    chains = (
        state.chains.get(trajectory)
        for trajectories in unassigned
        for trajectory in trajectories
        # A trajectory whose last assignment already loaded its version from the store restarts.
        if (assignment := state.assignments.get(trajectory)) is None or not assignment.from_history
    )
    return {chain.version for chain in chains if chain is not None and chain.version is not None}


def in_start_order(starts: Sequence[UnassignedSamples], room: int) -> list[UnassignedSamples]:
    """Sort by wave, oldest first, and within a wave by expected length, longest first; an unknown
    length counts as the most tokens allowed. If `room` is too small for all, one probe of each
    group of unknown length comes first in its wave, as in Seer.
    """
    parts = list(starts)
    if room < sum(len(samples.trajectories) for samples in starts):
        parts = [part for samples in starts for part in _split_off_probe(samples)]

    def start_key(start: UnassignedSamples) -> tuple[int, bool, float, int]:
        length = start.mean or start.prompt.sampling.tokens_max
        return start.group.admitted.wave, not start.is_probe(), -length, start.prompt.group

    return sorted(parts, key=start_key)


def _split_off_probe(samples: UnassignedSamples) -> list[UnassignedSamples]:
    probe = replace(samples, trajectories=samples.trajectories[:1])
    if not probe.is_probe() or len(samples.trajectories) == 1:
        return [samples]
    return [probe, replace(samples, trajectories=samples.trajectories[1:])]
