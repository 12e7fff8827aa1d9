"""Publishes whole weights: a delta of the believed version, or an anchor if one is due or a delta
is impossible.
"""

import logging
from dataclasses import replace

from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.storage.stores.base import content_hash
from rollstream.storage.weights.anchors import AnchorChain, AnchorRule, anchor_due, chain_of
from rollstream.storage.weights.fetch import fetch_tensors
from rollstream.storage.weights.form import FormPublisher, Publication, VersionForm
from rollstream.storage.weights.manifest import Manifest
from rollstream.storage.weights.publish import SHARD_INDEX, NewVersion, publish_version
from rollstream.storage.weights.tensors import DistributedTensors, Tensors
from rollstream.streams.values import Version

log = logging.getLogger(__name__)


class WholeForm(VersionForm):
    def publisher(self, publication: Publication) -> "WholePublisher":
        return WholePublisher(publication)


class WholePublisher(FormPublisher):
    """Keeps the believed version's tensors, the base of the next delta, and its chain."""

    def __init__(self, publication: Publication) -> None:
        self._p = publication
        self._base: Tensors | None = None  # once it is in memory
        self._chain: AnchorChain | None = None  # that ends with the believed version, once known

    def publish(
        self, version: Version, tensors: Tensors, parent: Manifest | None, is_fork: bool = False
    ) -> Manifest:
        p = self._p
        due = is_fork or self._is_anchor_due(
            version.number, parent, is_distributed=isinstance(tensors, DistributedTensors)
        )
        shard_bytes = p.settings.shard_bytes
        new = NewVersion(p.run, version, tensors, p.model_files, shard_bytes, p.clock(), p.leads)
        base = None if is_fork else self._base
        return publish_version(p.store, new, parent, base, due or base is None)

    def believed(self, manifest: Manifest, tensors: Tensors) -> None:
        before, delta = self._chain, manifest.delta
        if manifest.kind == "anchor" or before is None or delta is None:
            self._chain = AnchorChain(1, 0, manifest.full_bytes)
        else:
            total = before.delta_bytes + delta.bytes
            self._chain = replace(before, length=before.length + 1, delta_bytes=total)
        self._base = tensors if self._p.settings.deltas else None

    def repeated(self, tensors: Tensors) -> None:
        self._base = tensors if self._p.settings.deltas else None

    def _is_anchor_due(self, number: int, parent: Manifest | None, is_distributed: bool) -> bool:
        p = self._p
        if parent is None or not p.settings.deltas:
            return True
        # Ranks can make a delta only of a version that they published themselves and still hold:
        # parts of it cannot be loaded from the store.
        if is_distributed and self._base is None:
            return True
        # A delta keeps its anchor's model files, so changed ones need an anchor.
        if not self._has_files(parent):
            return True
        rule = AnchorRule(p.settings.anchor_every, p.settings.versions_max, p.settings.keep_every)
        try:
            self._chain = self._chain or chain_of(p.store, parent)
            due = anchor_due(number, self._chain, rule)
            if not due and self._base is None:
                # A restarted trainer has no tensors of the believed version yet.
                _, self._base = fetch_tensors(p.store, parent.version, parent.hash)
        except (ObjectMissing, CorruptObject) as error:
            log.warning("the next version is an anchor, the chain is broken: %s", error)
            return True
        return due

    def _has_files(self, parent: Manifest) -> bool:
        present = {f.name: f.hash for f in parent.model_files if f.name != SHARD_INDEX}
        files = self._p.model_files
        return present == {name: content_hash(data) for name, data in files.items()}
