"""Plans from which objects a reader makes each tensor: the path with the fewest bytes. Pure
(invariant 9): the caller passes manifests, from the wanted version back, until
`FetchPlanner.is_complete`, so it reads none in vain.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from rollstream.storage.weights.manifest import DeltaEntry, Manifest, TensorEntry
from rollstream.streams.values import Version

CHAIN_MAX = 512  # most manifests that one plan examines


@dataclass(frozen=True, slots=True)
class FetchStep:
    """Names the bytes to read for a tensor of `version`: the payload of `delta`, or the complete
    tensor (None).
    """

    version: Version
    name: str
    entry: TensorEntry
    delta: DeltaEntry | None

    @property
    def file(self) -> str:
        return self.entry.file if self.delta is None else self.delta.file

    @property
    def start(self) -> int:
        return self.entry.start if self.delta is None else self.delta.start

    @property
    def end(self) -> int:
        return self.entry.end if self.delta is None else self.delta.end

    @property
    def bytes(self) -> int:
        return self.end - self.start

    @property
    def key(self) -> tuple[Version, str, bool]:
        return (self.version, self.name, self.delta is not None)

    @property
    def is_whole(self) -> bool:
        """Returns whether the step replaces every element and needs no step before it."""
        return self.delta is None or self.delta.coding == "dense"


@dataclass(frozen=True, slots=True)
class FetchPath:
    """Lists the steps to a tensor, oldest first; none if the held tensor is the wanted one.

    The base is the reader's tensor, recognised by its hash, unless the first step is whole: the
    complete tensor of an anchor or a dense delta. Sparse deltas follow. So one plan also covers
    several deltas, and the repair of an update that failed half-way.
    """

    name: str
    entry: TensorEntry
    steps: tuple[FetchStep, ...]

    @property
    def bytes(self) -> int:
        return sum(step.bytes for step in self.steps)


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """Holds the hashes of the reader's tensors by name. None is of a version before `number`, so no
    search needs older manifests.
    """

    hashes: Mapping[str, str] = field(default_factory=dict[str, str])
    number: int = 0


BrokenSteps = Collection[tuple[Version, str, bool]]
"""Steps (version, name, whether a delta) whose bytes did not match their hash."""


class FetchPlanner:
    """Examines the wanted version's manifest, then its parents' in turn."""

    def __init__(
        self, names: Iterable[str], held_tensors: HeldTensors, broken: BrokenSteps = ()
    ) -> None:
        self._searches = [_PathSearch(name, held_tensors, broken) for name in names]
        self._open = list(self._searches)
        self._examined = 0

    @property
    def is_complete(self) -> bool:
        """Returns whether older manifests cannot improve any path."""
        return not self._open or self._examined >= CHAIN_MAX

    def examine(self, manifest: Manifest) -> None:
        """Examine one manifest; one that does not fit its child ends the paths through it."""
        self._examined += 1
        for search in self._open:
            search.examine(manifest)
        self._open = [search for search in self._open if not search.closed]

    def paths(self) -> dict[str, FetchPath | None]:
        """Returns the cheapest path to each tensor; None if the examined manifests have none."""
        return {search.name: search.best for search in self._searches}


class _PathSearch:
    def __init__(self, name: str, held_tensors: HeldTensors, broken: BrokenSteps) -> None:
        self.name, self._broken = name, broken
        self._held, self._number = held_tensors.hashes.get(name), held_tensors.number
        self.best: FetchPath | None = None
        self.closed = False
        self._entry: TensorEntry | None = None  # of the wanted version
        self._base: str | None = None  # hash that the tensor must have in the next manifest
        self._name_there = name  # the tensor's name in the next manifest
        self._steps: list[FetchStep] = []  # steps so far, newest first
        self._bytes = 0

    def examine(self, manifest: Manifest) -> None:
        owner = manifest.weights.owner(self._name_there)
        entry = manifest.weights.tensors.get(owner)
        if entry is None or self._base not in (None, entry.hash):
            self.closed = True
            return
        self._entry = self._entry or entry
        if self._held == entry.hash:
            self._offer(self._bytes)
            self.closed = True
            return
        complete_step = FetchStep(manifest.version, owner, entry, None)
        if entry.file and complete_step.key not in self._broken:
            self._offer(self._bytes + complete_step.bytes, complete_step)
        self._follow_delta(manifest, owner, entry)

    def _follow_delta(self, manifest: Manifest, owner: str, entry: TensorEntry) -> None:
        delta = manifest.delta and manifest.delta.tensors[owner]
        step = FetchStep(manifest.version, owner, entry, delta) if delta else None
        if delta is None or step is None or step.key in self._broken:
            self.closed = True
            return
        size = self._bytes + step.bytes
        if step.is_whole:
            self._offer(size, step)
            self.closed = True
            return
        if step.bytes:
            self._steps.append(step)
        self._bytes, self._name_there, self._base = size, owner, delta.base
        is_in_vain = self._held is None or manifest.version.number <= self._number
        # With a path, the search stops at the held version, or without one at the nearest complete
        # tensor.
        self.closed = self.best is not None and (size >= self.best.bytes or is_in_vain)

    def _offer(self, size: int, *first: FetchStep) -> None:
        assert self._entry is not None
        if self.best is None or size < self.best.bytes:
            steps = (*first, *reversed(self._steps))
            self.best = FetchPath(self.name, self._entry, steps)
