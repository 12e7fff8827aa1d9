"""Publishes the versions of a weight stream: stored once in the form of their tensors
(`storage/weights/form.py`), then believed (the pointer moves), then announced.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rollstream.errors import ConfigurationError, CorruptObject, ObjectMissing
from rollstream.storage.identity import read_or_create_identity
from rollstream.storage.settings import WeightsSettings
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.terms import STREAMS, next_term
from rollstream.storage.weights.form import FormPublisher, Publication, form_of_tensors
from rollstream.storage.weights.manifest import Manifest, combined_hash, read_manifest
from rollstream.storage.weights.named_streams import STREAMS_MAX, WeightStream, named_streams
from rollstream.storage.weights.pointer import (
    Pointer,
    advance_pointer,
    believed_pointer,
    pointer_to,
    take_pointer,
)
from rollstream.storage.weights.publish import announcement
from rollstream.storage.weights.retention import (
    PinnedByReaders,
    StoredVersion,
    delete_versions,
    plan_retention,
    stored_versions,
)
from rollstream.storage.weights.tensors import Tensors, tensor_hashes
from rollstream.streams.bus import Bus
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter

log = logging.getLogger(__name__)


@dataclass(slots=True)
class VersionWriter:
    """Publishes one term's versions in `store`, the stream's part of the run's store
    (`WeightStream.part`), and announces them by `writer`. `pinned` returns those that a rollout or
    an open partial needs, `to_continue` those that a resumed trainer needs; every anchor carries
    the `model_files` (configuration and tokenizer).

    If ranks share a model, each has a writer with the same decisions; all but rank 0 (`leads`)
    write only their part of the tensors.
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
    """The previous listing: its manifests are not read again."""
    _manifest: Manifest | None = None  # of the believed version
    _form: FormPublisher | None = None  # from the first tensors on
    _is_fork: bool = False
    """Whether a repeated step's bytes differed, until the next version."""

    def open(self) -> None:
        """Fences lower terms in the topic and at the pointer, and announces the believed version
        under this term; if its manifest is damaged or missing, the next version is an anchor
        instead.
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
        return None if self.pointer is None else self.pointer.version

    def publish(self, number: int, tensors: Tensors) -> Version:
        """Stores, believes and announces version `number`. The caller must not write to `tensors`,
        the next delta's base, until the next call has returned. For a repeated step, whose number
        is not above the believed one, nothing is written; deltas continue if the bytes are equal.
        """
        version, highest = Version(number, self.term), self.highest
        if highest is not None and number <= highest.number:
            if number == highest.number:
                self._check_repeated(tensors)
            return highest if number == highest.number else version
        form = self._form_of(tensors)
        manifest = form.publish(version, tensors, self._manifest, self._is_fork)
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
        """The hash of the tensors for which `publish` has just returned `version`."""
        manifest = self._manifest
        # A repeated step's hash is not in the manifest.
        if manifest is None or manifest.version != version or self._is_fork:
            return combined_hash(*tensor_hashes(tensors))
        return manifest.weights.combined_hash

    def _check_repeated(self, tensors: Tensors) -> None:
        if self._manifest is None:
            return
        self._is_fork = not self._manifest.weights.has_exactly(*tensor_hashes(tensors))
        if not self._is_fork:
            self._form_of(tensors).repeated(tensors)
            return
        # Other bits, for instance of another machine: the run continues as a fork under this term,
        # and the next version, with a higher number, is an anchor (docs/reference/invariants.md, A
        # trainer's step).
        log.warning("%s was published with other bits: the next version is an anchor", self.highest)

    def retain(self) -> None:
        """Deletes versions that are no longer needed, with a warning if `versions_max` removes a
        needed one. May run beside `publish`.
        """
        # Read before the listing, which therefore contains its version.
        pointer = self.pointer
        assert pointer is not None, "retention comes after a version was published"
        self._stored = stored_versions(self.store, self._stored)
        # A version above the pointer counts as being published, and is kept.
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


def open_named_stream(
    bus: Bus,
    store: ObjectStore,
    run: str,
    stream: WeightStream,
    settings: WeightsSettings,
    model_files: Mapping[str, bytes],
    clock: Callable[[], float] = time.time,
) -> VersionWriter:
    """Opens a named stream's writer under a new term: earlier writers are fenced. Readers keep
    versions by `VersionPins` in the stream's part. Before anything is written, raises as
    `read_or_create_identity`, and `ConfigurationError` if the run has `STREAMS_MAX` other named
    streams.
    """
    assert stream.name, "the policy's versions have the term of the trainer's lease"
    read_or_create_identity(store, run)
    others = {*named_streams(store)} - {stream}
    if len(others) >= STREAMS_MAX:
        raise ConfigurationError(
            f"run {run} has {len(others)} named weight streams, the most that a run may have: "
            f"publish in one of them, not in {stream.name}"
        )
    bus.create([stream.topic])
    term, part = next_term(store, STREAMS, stream.name), stream.part(store)
    writer = FencedWriter(bus, stream.topic.name, STREAMS, term)
    pinned = PinnedByReaders(part)
    versions = VersionWriter(part, writer, run, term, settings, model_files, pinned, clock=clock)
    versions.open()
    return versions
