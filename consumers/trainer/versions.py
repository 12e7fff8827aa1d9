"""The trainer's versions: published once, believed, announced; earlier terms fenced before the
first.

A step that is repeated after a crash makes the bytes again that its version already has: a number
that is believed is recognised and not written again. Where the bytes differ (another machine), the
run goes on as a fork that publishes nothing until its number passes the highest believed one
(DESIGN.md, Trainer).
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from storage.manifest import Manifest, manifest_key, read_manifest
from storage.objects import ObjectStore
from storage.pointer import Pointer, believe, believed, take_pointer
from storage.publish import publish
from storage.retention import StoredVersion, plan_retention, retain, stored_versions
from storage.settings import WeightsSettings
from streams.records import Version, WeightsAnnounced
from streams.writer import FencedWriter

log = logging.getLogger(__name__)


@dataclass(slots=True)
class VersionWriter:
    """One term of the trainer. `pinned` says which versions live rollouts hold."""

    store: ObjectStore
    writer: FencedWriter
    run: str
    term: int
    settings: WeightsSettings
    model_files: Mapping[str, bytes]
    pinned: Callable[[], Collection[Version]]
    clock: Callable[[], float] = time.time
    pointer: Pointer | None = None
    _stored: Sequence[StoredVersion] = ()

    def open(self) -> None:
        """Fence lower terms in topic and store, and announce what is believed under this term."""
        self.writer.open()
        take_pointer(self.store, self.run, self.term)
        self.pointer = believed(self.store)
        if self.highest is not None:
            self._announce(read_manifest(self.store, self.highest))

    @property
    def highest(self) -> Version | None:
        """The believed version, None before the first."""
        return None if self.pointer is None else self.pointer.version

    def publish(self, number: int, tensors: Mapping[str, torch.Tensor]) -> Version:
        """Make this number believed and announced, unless it is already; returns its version."""
        version, highest = Version(number, self.term), self.highest
        if highest is not None and number <= highest.number:
            return highest if number == highest.number else version
        manifest = publish(
            self.store,
            self.run,
            version,
            tensors,
            self.model_files,
            shard_bytes=self.settings.shard_bytes,
            parent=highest,
            created_s=self.clock(),
        )
        self.pointer = believe(self.store, manifest)
        self._announce(manifest)
        return version

    def retain(self) -> None:
        """Delete what nothing needs any more; a bound that takes a held version says so."""
        assert self.pointer is not None, "retention comes after a version was published"
        self._stored = stored_versions(self.store, self._stored)
        plan = plan_retention(
            self._stored,
            self.pointer,
            self.pinned(),
            self.settings.keep_every,
            self.settings.versions_max,
        )
        for version in plan.unpinned:
            log.warning("%s is held, but versions_max = %d", version, self.settings.versions_max)
        retain(self.store, plan, self.term)

    def _announce(self, manifest: Manifest) -> None:
        record = WeightsAnnounced(
            run=self.run,
            version=manifest.version,
            manifest=manifest_key(manifest.version),
            manifest_hash=manifest.hash,
            kind=manifest.kind,
            parent=manifest.parent,
            bytes=manifest.bytes,
            time_s=self.clock(),
        )
        self.writer.append([(self.run, record)])
