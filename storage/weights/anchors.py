"""When a version must be an anchor (a pure rule: invariant 9), and the cheapest paths to its
tensors.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.fetch_plan import BrokenSteps, FetchPath, FetchPlanner, HeldTensors
from rollstream.storage.weights.manifest import Manifest, read_manifest

BYTES_SHARE = 1 / 3
"""Most bytes of a chain's deltas, as a share of a full version: above it another delta would cost a
late reader more than an anchor saves.
"""
BESIDE_SHARE = 1 / 2
"""An anchor also holds its delta, for readers of its parent, up to this share of a full version."""
MULTIPLES_MIN = 4
"""If `versions_max` has no room for this many multiples of `keep_every` and all versions between,
each multiple is an anchor: that can be kept alone, a delta only with its chain.
"""


@dataclass(frozen=True, slots=True)
class AnchorRule:
    """Bounds a chain to `every` versions; `versions_max` and `keep_every` are settings of retention
    (`retention.py`).
    """

    every: int
    versions_max: int
    keep_every: int

    @property
    def length_max(self) -> int:
        # Two complete chains always fit in `versions_max`, so retention keeps the believed version
        # and any version of the previous chain that a rollout still holds.
        return max(1, min(self.every, self.versions_max // 2))


@dataclass(frozen=True, slots=True)
class AnchorChain:
    """The versions of a chain with its anchor, the bytes of its deltas, and those of one full
    version.
    """

    length: int
    delta_bytes: int
    full_bytes: int


def anchor_due(number: int, chain: AnchorChain | None, rule: AnchorRule) -> bool:
    """Returns whether version `number` must be an anchor; `chain` ends with the one before."""
    if chain is None or chain.length >= rule.length_max:
        return True
    if chain.delta_bytes > BYTES_SHARE * chain.full_bytes:
        return True
    crowded = rule.keep_every * MULTIPLES_MIN > rule.versions_max
    return rule.keep_every > 0 and crowded and number % rule.keep_every == 0


def is_kept_beside(delta_bytes: int, full_bytes: int) -> bool:
    return delta_bytes <= BESIDE_SHARE * full_bytes


def lineage(store: ObjectStore, manifest: Manifest) -> Iterator[Manifest]:
    """Yields the manifest, then its parents while each child is a difference. Raises
    `ObjectMissing` if one is gone, `CorruptObject` if it is not exactly the one its child was made
    from.
    """
    yield manifest
    while manifest.delta is not None and manifest.parent is not None:
        manifest = read_manifest(store, manifest.parent, manifest.delta.parent_hash)
        yield manifest


def find_fetch_paths(
    store: ObjectStore,
    manifest: Manifest,
    names: Collection[str],
    held_tensors: HeldTensors | None = None,
    broken: BrokenSteps = (),
) -> dict[str, FetchPath]:
    """Returns the cheapest paths (stored names) without the `broken` steps. Raises `ObjectMissing`
    or `CorruptObject`, with the reason, if a tensor has none.
    """
    planning = FetchPlanner(names, held_tensors or HeldTensors(), broken)
    reason: ObjectMissing | CorruptObject | None = None
    try:
        for ancestor in lineage(store, manifest):
            planning.examine(ancestor)
            if planning.is_complete:
                break
    except (ObjectMissing, CorruptObject) as error:
        # No failure if another path exists.
        reason = error
    paths = planning.paths()
    cheapest = {name: path for name, path in paths.items() if path is not None}
    lost = [name for name in paths if name not in cheapest]
    if lost:
        kind = type(reason) if reason is not None else CorruptObject
        why = reason or "no stored anchor or delta leads to it any more"
        raise kind(
            f"version {manifest.version}: tensor {lost[0]} ({len(lost)} of {len(paths)}) cannot be "
            f"made: {why}; fetch another version"
        )
    return cheapest


def find_other_paths(
    store: ObjectStore,
    manifest: Manifest,
    failed: Mapping[str, CorruptObject],
    broken: BrokenSteps,
    held_tensors: HeldTensors | None = None,
) -> dict[str, FetchPath]:
    """Returns paths without the broken steps, or raises the first failure."""
    try:
        return find_fetch_paths(store, manifest, tuple(failed), held_tensors, broken)
    except (ObjectMissing, CorruptObject) as error:
        raise next(iter(failed.values())) from error


def chain_of(store: ObjectStore, manifest: Manifest) -> AnchorChain:
    length, delta_bytes = 0, 0
    for ancestor in lineage(store, manifest):
        length += 1
        # The delta beside an anchor is no part of the chain.
        if ancestor.kind == "anchor":
            break
        delta_bytes += ancestor.delta.bytes if ancestor.delta else 0
    return AnchorChain(length, delta_bytes, manifest.full_bytes)
