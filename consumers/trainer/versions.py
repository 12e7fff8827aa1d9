"""Publishes the trainer's versions (`VersionWriter`): each is stored once in the form that its
tensors have (`storage/weights/form.py`), then believed (the pointer `latest.json` moves to it),
then announced in the topic `weights`. Before its first version a trainer fences all lower terms.

A step that is repeated after a crash produces the bytes of its version again, and the stored
version stays. If the bytes differ, nothing is published until the step's number is above that of
the believed version; the version of that step is an anchor (`_check_repeated`).
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.storage.settings import WeightsSettings
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.form import FormPublisher, Publication, form_of_tensors
from rollstream.storage.weights.manifest import Manifest, combined_hash, read_manifest
from rollstream.storage.weights.pointer import (
    Pointer,
    advance_pointer,
    believed_pointer,
    pointer_to,
    take_pointer,
)
from rollstream.storage.weights.publish import announcement
from rollstream.storage.weights.retention import (
    StoredVersion,
    delete_versions,
    plan_retention,
    stored_versions,
)
from rollstream.storage.weights.tensors import Tensors, tensor_hashes
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter

log = logging.getLogger(__name__)


@dataclass(slots=True)
class VersionWriter:
    """Publishes the versions of one term of the trainer. `pinned` returns the versions that a
    rollout or an open partial needs (`data/retention.py`), and `to_continue` those that a resumed
    trainer needs (`past_versions.py`); `model_files` are the configuration and tokenizer files that
    every anchor carries, by name.

    If several ranks share a model, every rank has a writer, and all writers make the same
    decisions. On every rank but 0 `leads` is False: the writer then writes this rank's part of the
    tensors and nothing else.
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
    _form: FormPublisher | None = None  # from the first tensors on
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
        form = self._form_of(tensors)
        manifest = form.publish(version, tensors, self._manifest)
        self.pointer = advance_pointer(self.store, manifest) if self.leads else pointer_to(manifest)
        form.believed(manifest, tensors)
        self._manifest, self._is_fork = manifest, False
        self._announce(manifest)
        return version

    def _form_of(self, tensors: Tensors) -> FormPublisher:
        if self._form is None:
            publication = Publication(
                self.store, self.run, self.settings, self.model_files, self.clock, self.leads
            )
            self._form = form_of_tensors(tensors).publisher(publication)
        return self._form

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
        self._form_of(tensors).repeated(tensors, same)
        if not same:
            log.warning(
                "%s was published with other bits: the next version is an anchor", self.highest
            )

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
