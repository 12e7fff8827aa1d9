"""Decides when a version must be an anchor (`anchor_due`, a pure rule: invariant 9), and finds the
cheapest paths to a version's tensors along its chain (`find_fetch_paths`).

A chain is an anchor and the deltas on it. A path lists what a reader fetches for one tensor: its
bytes in an anchor, unless the reader holds it in an older version, then in the deltas since.
Manifests are read from the version back through its parents, only as many as needed.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.fetch_plan import BrokenSteps, FetchPath, FetchPlanner, HeldTensors
from rollstream.storage.weights.manifest import Manifest, read_manifest

BYTES_SHARE = 1 / 3
"""The most bytes of a chain's deltas together, as a share of a full version. Above it the chain
ends, because another delta would cost a late reader more than an anchor saves.
"""
BESIDE_SHARE = 1 / 2
"""An anchor also holds its delta, for readers of its parent, if the delta is at most this share of
a full version.
"""
MULTIPLES_MIN = 4
"""Retention prefers versions whose number is a multiple of `keep_every`. If `versions_max` has no
room for this many multiples and all versions between them, each multiple is an anchor: an anchor
can be kept alone, a delta only with its chain.
"""


@dataclass(frozen=True, slots=True)
class AnchorRule:
    """Bounds the chain. `every` is the most versions of one chain; `versions_max` and `keep_every`
    are settings of retention (`retention.py`).
    """

    every: int
    versions_max: int
    keep_every: int

    @property
    def length_max(self) -> int:
        """Returns the length at which a chain ends. Two complete chains always fit in
        `versions_max`, so retention keeps the believed version together with any version of the
        previous chain that a rollout still holds.
        """
        return max(1, min(self.every, self.versions_max // 2))


@dataclass(frozen=True, slots=True)
class AnchorChain:
    """Measures the believed version's chain: the number of its versions including the anchor, the
    bytes of its deltas, and those of one full version.
    """

    length: int
    delta_bytes: int
    full_bytes: int


def anchor_due(number: int, chain: AnchorChain | None, rule: AnchorRule) -> bool:
    """Returns whether version `number` must be an anchor. `chain` ends with the version before it;
    None if there is no version before it.
    """
    if chain is None or chain.length >= rule.length_max:
        return True
    if chain.delta_bytes > BYTES_SHARE * chain.full_bytes:
        return True
    crowded = rule.keep_every * MULTIPLES_MIN > rule.versions_max
    return rule.keep_every > 0 and crowded and number % rule.keep_every == 0


def is_kept_beside(delta_bytes: int, full_bytes: int) -> bool:
    """Returns whether an anchor also holds its delta."""
    return delta_bytes <= BESIDE_SHARE * full_bytes


def lineage(store: ObjectStore, manifest: Manifest) -> Iterator[Manifest]:
    """Yield the manifest, then its parents as long as each child is stored as a difference from its
    parent.

    Each parent is exactly the one that its child was made from. Raises `ObjectMissing` if one is
    gone, `CorruptObject` if the stored one has another hash.
    """
    yield manifest
    while manifest.delta is not None and manifest.parent is not None:
        manifest = read_manifest(store, manifest.parent, manifest.delta.parent_hash)
        yield manifest


def find_fetch_paths(
    store: ObjectStore,
    manifest: Manifest,
    names: Collection[str],
    held: HeldTensors | None = None,
    broken: BrokenSteps = (),
) -> dict[str, FetchPath]:
    """Returns the cheapest path to each of these tensors, whose names are those under which the
    manifest stores them. `held` are the reader's tensors, `broken` the steps that a path must not
    use.

    Raises `ObjectMissing` or `CorruptObject`, with the reason, if a tensor has no path. A missing
    or damaged manifest is no error if another path exists.
    """
    planning = FetchPlanner(names, held or HeldTensors(), broken)
    reason: ObjectMissing | CorruptObject | None = None
    try:
        for ancestor in lineage(store, manifest):
            planning.examine(ancestor)
            if planning.is_complete:
                break
    except (ObjectMissing, CorruptObject) as error:
        reason = error
    paths = planning.paths()
    found = {name: path for name, path in paths.items() if path is not None}
    lost = [name for name in paths if name not in found]
    if lost:
        kind = type(reason) if reason is not None else CorruptObject
        why = reason or "no stored anchor or delta leads to it any more"
        raise kind(
            f"version {manifest.version}: tensor {lost[0]} ({len(lost)} of {len(paths)}) cannot be "
            f"made: {why}; fetch another version"
        )
    return found


def find_other_paths(
    store: ObjectStore,
    manifest: Manifest,
    failed: Mapping[str, CorruptObject],
    broken: BrokenSteps,
    held: HeldTensors | None = None,
) -> dict[str, FetchPath]:
    """Returns paths without the broken steps to the tensors that failed; raises the first failure
    if one of them has no such path.
    """
    try:
        return find_fetch_paths(store, manifest, tuple(failed), held, broken)
    except (ObjectMissing, CorruptObject) as error:
        raise next(iter(failed.values())) from error


def chain_of(store: ObjectStore, manifest: Manifest) -> AnchorChain:
    """Returns the chain whose newest version is `manifest`; raises as `lineage` does."""
    length, delta_bytes = 0, 0
    for ancestor in lineage(store, manifest):
        length += 1
        if ancestor.kind == "anchor":
            break
        delta_bytes += ancestor.delta.bytes if ancestor.delta else 0
    return AnchorChain(length, delta_bytes, manifest.full_bytes)
