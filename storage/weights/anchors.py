"""Reads manifests from a version back through its parents, only as many as are needed."""

from collections.abc import Collection, Iterator

from rollstream.storage.weights.manifest import Manifest, read_manifest
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.anchoring import AnchorChain
from rollstream.storage.weights.fetch_plan import HeldTensors, FetchPlanner, FetchPrices, FetchPath
from rollstream.errors import CorruptObject, ObjectMissing


def lineage(store: ObjectStore, manifest: Manifest) -> Iterator[Manifest]:
    """The manifest, then its parents as long as each one is a difference from the one before.

    Each parent is exactly the one that its child was made from. Raises `ObjectMissing` if one is
    gone, `CorruptObject` if it is another one.
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
    prices: FetchPrices | None = None,
) -> dict[str, FetchPath]:
    """The cheapest way to each of these tensors, by the names that the manifest stores them
    under.

    Raises `ObjectMissing` or `CorruptObject`, with the reason, if a tensor has none. A missing or
    damaged manifest is no error if another way exists.
    """
    planning = FetchPlanner(names, held or HeldTensors(), prices or FetchPrices())
    reason: ObjectMissing | CorruptObject | None = None
    try:
        for one in lineage(store, manifest):
            planning.examine(one)
            if planning.is_complete:
                break
    except (ObjectMissing, CorruptObject) as error:
        reason = error
    ways = planning.ways()
    found = {name: way for name, way in ways.items() if way is not None}
    lost = [name for name in ways if name not in found]
    if lost:
        kind = type(reason) if reason is not None else CorruptObject
        why = reason or "no stored anchor or delta leads to it any more"
        raise kind(
            f"version {manifest.version}: tensor {lost[0]} ({len(lost)} of {len(ways)}) cannot be "
            f"made: {why}; fetch another version"
        )
    return found


def chain_of(store: ObjectStore, manifest: Manifest) -> AnchorChain:
    """The chain whose newest version this is; raises as `lineage` does."""
    length, delta_bytes = 0, 0
    for one in lineage(store, manifest):
        length += 1
        if one.kind == "anchor":
            break
        delta_bytes += one.delta.bytes if one.delta else 0
    return AnchorChain(length, delta_bytes, manifest.full_bytes)
