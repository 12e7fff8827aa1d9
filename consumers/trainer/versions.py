"""Publishes the trainer's versions (`VersionWriter`): each is stored once as an anchor, a delta or
an adapter, then believed (the pointer `latest.json` moves to it), then announced in the topic
`weights`. Before its first version a trainer fences all lower terms.

A step that is repeated after a crash produces the bytes of its version again, and the stored
version stays. If the bytes differ, nothing is published until the step's number is above that of
the believed version; the version of that step is an anchor (`_check_repeated`).
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.storage.settings import WeightsSettings
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.weights.adapters import AdapterTensors, publish_adapter, publish_base
from rollstream.storage.weights.anchors import AnchorChain, AnchorRule, anchor_due, chain_of
from rollstream.storage.weights.manifest import Manifest, combined_hash, read_manifest
from rollstream.storage.weights.pointer import (
    Pointer,
    advance_pointer,
    believed_pointer,
    pointer_to,
    take_pointer,
)
from rollstream.storage.weights.publish import (
    SHARD_INDEX,
    NewVersion,
    announcement,
    publish_version,
)
from rollstream.storage.weights.resident import ResidentWeights
from rollstream.storage.weights.retention import (
    StoredVersion,
    delete_versions,
    plan_retention,
    stored_versions,
)
from rollstream.storage.weights.tensors import (
    DistributedTensors,
    Tensors,
    tensor_hashes,
)
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter

log = logging.getLogger(__name__)


@dataclass(slots=True)
class VersionWriter:
    """Publishes the versions of one term of the trainer. `pinned` returns the versions that a
    rollout or an open partial needs (`data/retention.py`), and `to_continue` those that a resumed
    trainer needs (`past_versions.py`); `model_files` are the configuration and tokenizer files that
    every anchor carries, by name.

    An anchor and the deltas on it are a chain (`storage/weights/anchors.py`). If several ranks
    share a model, every rank has a writer, and all writers make the same decisions. On every rank
    but 0 `leads` is False: the writer then writes this rank's part of the tensors and nothing else.
    """

    store: ObjectStore
    writer: FencedWriter
    run: str
    term: int
    settings: WeightsSettings
    model_files: Mapping[str, bytes]
    pinned: Callable[[], Collection[Version]]
    to_continue: Callable[[], Collection[Version]] = tuple
    clock: Callable[[], float] = time.time
    leads: bool = True
    pointer: Pointer | None = None
    _stored: Sequence[StoredVersion] = ()
    """The versions of the previous listing: their manifests are not read again."""
    _manifest: Manifest | None = None  # of the believed version
    _tensors: Tensors | None = None  # of the believed version, once they are in memory
    _chain: AnchorChain | None = None  # that ends with the believed version, once it is known
    _base: Manifest | None = None
    """The frozen base of the run's adapters, once it is known to be stored."""
    _is_fork: bool = False
    """Whether a repeated step had other bytes than the believed version, until the next version."""

    def open(self) -> None:
        """Fence lower terms in the topic `weights` and at the store's pointer, and announce the
        believed version under this term. If its manifest is damaged or missing, it is not
        announced, and the next version is an anchor.
        """
        if self.leads:
            self.writer.open()
            take_pointer(self.store, self.run, self.term)
        self.pointer = believed_pointer(self.store)
        if self.pointer is not None and self.highest is not None:
            try:
                self._manifest = read_manifest(self.store, self.highest, self.pointer.manifest_hash)
            except (CorruptObject, ObjectMissing) as error:
                log.warning(
                    "the manifest of %s cannot be read: no rollout can fetch this version, and the "
                    "next one is an anchor: %s",
                    self.highest,
                    error,
                )
                return
            self._announce(self._manifest)

    @property
    def highest(self) -> Version | None:
        """The believed version; None before the first one."""
        return None if self.pointer is None else self.pointer.version

    def publish(self, number: int, tensors: Tensors) -> Version:
        """Store `tensors` as version `number`, move the pointer to it and announce it; returns the
        version. The number of a repeated step is not above that of the believed version: then
        nothing is written, and deltas continue from the believed version if the bytes are equal.

        The tensors are the base of the next delta: the caller must not write to them until the
        next call has returned.
        """
        version, highest = Version(number, self.term), self.highest
        if highest is not None and number <= highest.number:
            if number == highest.number:
                self._check_repeated(tensors)
            return highest if number == highest.number else version
        if isinstance(tensors, AdapterTensors):
            manifest = self._publish_adapter(version, tensors)
        else:
            manifest = self._publish_weights(version, tensors)
        self.pointer = advance_pointer(self.store, manifest) if self.leads else pointer_to(manifest)
        self._continue_from(manifest, tensors)
        self._announce(manifest)
        return version

    def _publish_weights(self, version: Version, tensors: Tensors) -> Manifest:
        """Publish whole weights: a delta of the believed version, or an anchor if one is due."""
        due = self._is_anchor_due(version.number, isinstance(tensors, DistributedTensors))
        new = NewVersion(
            self.run,
            version,
            tensors,
            self.model_files,
            self.settings.shard_bytes,
            self.clock(),
            self.leads,
        )
        due = due or self._tensors is None
        return publish_version(self.store, new, self._manifest, self._tensors, due)

    def _publish_adapter(self, version: Version, tensors: AdapterTensors) -> Manifest:
        """Publish an adapter, which is stored complete (`storage/weights/adapters.py`). Before the
        first adapter of this term the frozen base weights are stored, or compared with the stored
        ones.
        """
        if self._base is None:
            files, shard_bytes = self.model_files, self.settings.shard_bytes
            self._base = publish_base(
                self.store, self.run, tensors.base(), files, shard_bytes, self.clock(), self.leads
            )
        parent, now_s = self._manifest, self.clock()
        return publish_adapter(self.store, version, tensors, self._base, parent, now_s, self.leads)

    def weights_hash(self, version: Version, tensors: Tensors) -> str:
        """Returns the hash of the tensors for which `publish` has just returned `version`. The hash
        of new tensors is in the believed version's manifest; that of a repeated step's tensors may
        have to be computed here.
        """
        manifest = self._manifest
        if manifest is None or manifest.version != version or self._is_fork:
            return combined_hash(*tensor_hashes(tensors))
        return manifest.weights.combined_hash

    def _check_repeated(self, tensors: Tensors) -> None:
        """Compare the tensors of a repeated step with those of the believed version, which has the
        same number. If they differ (on another machine, for instance), the run continues as a fork
        under this term: the next version, which has a higher number, is an anchor
        (docs/reference/invariants.md, A trainer's step). If the manifest of the believed version is
        unreadable, no comparison is possible.
        """
        if self._manifest is None:
            return
        hashes, tied = tensor_hashes(tensors)
        weights = self._manifest.weights
        same = tied == weights.tied and hashes == {n: e.hash for n, e in weights.tensors.items()}
        self._is_fork = not same
        self._tensors = tensors if same and self.settings.deltas else None
        if not same:
            log.warning(
                "%s was published with other bits: the next version is an anchor", self.highest
            )

    def _is_anchor_due(self, number: int, is_distributed: bool) -> bool:
        """Returns whether version `number` must be an anchor: a delta is impossible, or the rule of
        `storage/weights/anchors.py` (`anchor_due`) requires an anchor. If the version may be a
        delta, the tensors of its base, the believed version, are in memory afterwards.

        Tensors that are distributed over ranks can be a delta only of a version that these
        processes published themselves and still hold: it cannot be loaded from the store in parts.
        """
        if self._manifest is None or self._is_fork or not self.settings.deltas:
            return True
        if is_distributed and self._tensors is None:
            return True
        if not self._has_files(self._manifest):
            return True
        s = self.settings
        rule = AnchorRule(s.anchor_every, s.versions_max, s.keep_every)
        try:
            self._chain = self._chain or chain_of(self.store, self._manifest)
            due = anchor_due(number, self._chain, rule)
            if not due and self._tensors is None:
                base = ResidentWeights()
                base.update(self.store, self._manifest.version, self._manifest.hash)
                self._tensors = base.tensors
        except (ObjectMissing, CorruptObject) as error:
            log.warning("the next version is an anchor, the chain is broken: %s", error)
            return True
        return due

    def _has_files(self, manifest: Manifest) -> bool:
        """Returns whether the version's chain carries the same model files as this writer."""
        present = {f.name: f.hash for f in manifest.model_files if f.name != SHARD_INDEX}
        return present == {name: content_hash(data) for name, data in self.model_files.items()}

    def _continue_from(self, manifest: Manifest, tensors: Tensors) -> None:
        before, delta = self._chain, manifest.delta
        if manifest.kind == "anchor" or before is None or delta is None:
            self._chain = AnchorChain(1, 0, manifest.full_bytes)
        else:
            total = before.delta_bytes + delta.bytes
            self._chain = replace(before, length=before.length + 1, delta_bytes=total)
        self._manifest, self._is_fork = manifest, False
        has_deltas = self.settings.deltas and not isinstance(tensors, AdapterTensors)
        self._tensors = tensors if has_deltas else None

    def retain(self) -> None:
        """Delete versions that are no longer needed; a warning is logged if `versions_max` removes
        one that is still needed. This method may run in another thread beside `publish`: a version
        above the pointer counts as being published, and is kept.
        """
        pointer = self.pointer  # read before the listing, which therefore contains its version
        assert pointer is not None, "retention comes after a version was published"
        self._stored = stored_versions(self.store, self._stored)
        plan = plan_retention(
            self._stored,
            pointer,
            self.pinned(),
            self.settings.keep_every,
            self.settings.versions_max,
            self.to_continue(),
        )
        for version in plan.unpinned:
            log.warning(
                "%s is deleted while still needed: versions_max = %d",
                version,
                self.settings.versions_max,
            )
        delete_versions(self.store, plan, self.term)

    def _announce(self, manifest: Manifest) -> None:
        if self.leads:
            self.writer.append([(self.run, announcement(manifest, self.clock()))])
