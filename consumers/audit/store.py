"""Checks invariants 6 and 11 in the store: every version and every checkpoint with a manifest is
whole and unchanged, and the pointer is not behind the ledger. At most one file is in memory. What
retention removes meanwhile is skipped.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from rollstream.consumers.audit.folds import InvariantResult, LedgerIndex
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.audit.versions import KnownRollouts, VersionAudit
from rollstream.consumers.trainer.checkpoint import TrainerState, missing_records
from rollstream.errors import CorruptObject, ObjectMissing, StoreError, TopicMissing
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.weights.checkpoints import (
    CheckpointId,
    checkpoint_manifest,
    checkpoint_state,
    stored_checkpoints,
)
from rollstream.storage.weights.manifest import (
    FileEntry,
    Manifest,
    manifest_key,
    read_manifest,
    version_folder,
)
from rollstream.storage.weights.named_streams import POLICY, WeightStream, named_streams
from rollstream.storage.weights.pointer import POINTER_KEY, Pointer, read_pointer
from rollstream.storage.weights.retention import listed_versions
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import WeightsAnnounced
from rollstream.streams.values import Version

ProgressCallback = Callable[[str], None]


@dataclass(slots=True)
class StoreAudit:
    """Checks the versions of a weight stream, whose part of the run's store is `store`; `check`
    must be called after `versions` has received the whole log. `tell` is called with the name of
    each version before it is read. `in_ledger`: the ledger has the step of each version; without
    it numbers may skip, and the chain of parents shows which versions were believed.

    The chain of parents is followed from `weights/latest.json` as far as retention left it. Each
    kept version is compared with the log by its manifest's hash, with the manifest by size and hash
    of each file, and with its step by the hash of its tensors.
    """

    store: ObjectStore
    versions: VersionAudit
    tell: ProgressCallback = lambda text: None
    stream: WeightStream = POLICY
    in_ledger: bool = True
    _manifests: dict[Version, Manifest] = field(default_factory=dict[Version, Manifest])
    _chain: list[Version] = field(default_factory=list[Version])
    """The believed version, then its parents as far as their manifests are kept."""

    @property
    def result(self) -> InvariantResult:
        return self.versions.result

    def _violates(self, what: str, key: str) -> None:
        self.result.add_violation(what, key=self.stream.prefix + key)

    def check(self) -> None:
        try:
            present = read_pointer(self.store)
        except CorruptObject as error:
            self._violates(str(error), POINTER_KEY)
            return
        if present is None:
            self._without_pointer()
            return
        pointer = present[0]
        self._check_pointer(pointer)
        self._read_manifests()
        self._check_believed(pointer)
        for version in sorted(self._manifests):
            self.tell(f"{self.stream.prefix}{version}")
            self._check_version(self._manifests[version], pointer)

    def _without_pointer(self) -> None:
        if any(True for _ in self.store.list("weights/")):
            self._violates("versions exist, but no pointer", POINTER_KEY)
        else:
            self.result.add_unchecked(f"the store holds no {self.stream.prefix}weights/")

    def _check_pointer(self, pointer: Pointer) -> None:
        last, believed = self.versions.last, pointer.version
        if pointer.term < self.versions.term:
            what = f"its term is {pointer.term}, the ledger's is {self.versions.term}"
            self._violates(what, POINTER_KEY)
        if last is None:
            return
        same = believed is not None and believed.number == last.version.number
        is_behind = believed is None or believed.number < last.version.number
        if is_behind or (same and believed != last.version):
            what = f"it names version {believed}, the ledger {last.version}"
            self._violates(what, POINTER_KEY)

    def _read_manifests(self) -> None:
        for version in listed_versions(self.store):
            try:
                self._manifests[version] = read_manifest(self.store, version)
            except ObjectMissing:
                self.result.counts["without a manifest"] += 1
            except CorruptObject as error:
                self._violates(str(error), manifest_key(version))

    def _check_believed(self, pointer: Pointer) -> None:
        version = pointer.version
        if version is None:
            return
        manifest = self._manifests.get(version)
        key = manifest_key(version)
        if manifest is None:
            # The run may have published another version, and retention removed this one.
            if self._still_believed(pointer):
                self._violates("the believed version has no readable manifest", key)
        elif manifest.hash != pointer.manifest_hash:
            what = f"its hash is {manifest.hash}, the pointer names {pointer.manifest_hash}"
            self._violates(what, key)
        while manifest is not None:
            self._chain.append(manifest.version)
            if manifest.parent is None:
                break
            child, parent = manifest.version, manifest.parent
            is_next = parent.number == child.number - 1 or not self.in_ledger
            if not is_next or parent.term > child.term:
                what = f"version {child} has the parent {parent}"
                self._violates(what, manifest_key(child))
            self.result.counts["in the chain"] += 1
            manifest = self._manifests.get(parent)

    def _still_believed(self, pointer: Pointer) -> bool:
        present = read_pointer(self.store)
        return present is not None and present[0].version == pointer.version

    def _check_version(self, manifest: Manifest, pointer: Pointer) -> None:
        version, key = manifest.version, manifest_key(manifest.version)
        logged = self.versions.hashes.get(version)
        if logged is not None and logged != manifest.hash:
            what = f"the log names manifest {logged}, the store has {manifest.hash}"
            self._violates(what, key)
        if not self._is_believed(version, pointer):
            self.result.counts["never believed"] += 1
            # A fenced trainer may write its manifest after its files were deleted: harmless.
            if logged is None and version.term < pointer.term:
                return
        self._check_base(manifest)
        self._check_hash_of_step(manifest)
        self.result.counts["versions kept"] += 1
        for file in manifest.files:
            wrong = self._wrong_file(version, file)
            if wrong is None:
                return  # retention removed it meanwhile
            if wrong:
                self._violates(wrong, f"{version_folder(version)}/{file.name}")

    def _is_believed(self, version: Version, pointer: Pointer) -> bool:
        if not self.in_ledger:
            # No version below the chain's end is known to be a zombie's.
            is_older = not self._chain or version < self._chain[-1]
            return is_older or version in self._chain
        if version.number or version == pointer.version:
            return self.versions.ledger.is_believed(version)
        # The ledger has no step 0: version 0 was believed if the pointer, the log or a child names
        # it.
        is_logged = version in self.versions.hashes
        return is_logged or any(version in (m.parent, m.base) for m in self._manifests.values())

    def _check_base(self, manifest: Manifest) -> None:
        if manifest.adapter:
            base_version, base_hash = manifest.anchor, manifest.adapter.base_hash
        elif manifest.delta is not None and manifest.parent is not None:
            base_version, base_hash = manifest.parent, manifest.delta.parent_hash
        else:
            return
        base, key = self._manifests.get(base_version), manifest_key(manifest.version)
        if base is None:
            if manifest.base == base_version and self._has_manifest(manifest.version):
                self._violates(f"its base {base_version} is missing", key)
        elif base_hash != base.hash:
            what = f"it applies to manifest {base_hash}, but {base_version} has {base.hash}"
            self._violates(what, key)

    def _check_hash_of_step(self, manifest: Manifest) -> None:
        done = self.versions.states.get(manifest.version.number)
        if done is None or not done.weights_hash or done.version != manifest.version:
            return
        self.result.counts["versions compared with their step"] += 1
        combined = manifest.weights.combined_hash
        if combined != done.weights_hash:
            what = f"its tensors have the hash {combined}, step {done.step} has {done.weights_hash}"
            self._violates(what, manifest_key(manifest.version))

    def _wrong_file(self, version: Version, file: FileEntry) -> str | None:
        """Returns the problem with a file, "" for none; None if its version is being removed."""
        key = f"{version_folder(version)}/{file.name}"
        try:
            data = self.store.get(key)
        except ObjectMissing:
            return "it is missing" if self._has_manifest(version) else None
        self.result.counts["files"] += 1
        self.result.counts["bytes"] += len(data)
        if len(data) != file.bytes:
            return f"it has {len(data)} bytes, by its manifest {file.bytes}"
        digest = content_hash(data)
        return "" if digest == file.hash else f"its hash is {digest}, by its manifest {file.hash}"

    def _has_manifest(self, version: Version) -> bool:
        try:
            self.store.stat(manifest_key(version))
        except ObjectMissing:
            return False
        except StoreError:
            return True
        return True


def check_named_streams(
    store: ObjectStore, bus: Bus | None, result: InvariantResult, tell: ProgressCallback
) -> None:
    """Check the versions of the named weight streams in the run's store and, if there is a log,
    their announcements; `result` gets what they violate.
    """
    for stream in named_streams(store):
        versions = VersionAudit(LedgerIndex(), KnownRollouts(None), result)
        if bus is not None:
            for record in _announcements(bus, stream):
                versions.hashes.setdefault(record.version, record.manifest_hash)
        StoreAudit(stream.part(store), versions, tell, stream, in_ledger=False).check()
        result.counts["named streams"] += 1


def _announcements(bus: Bus, stream: WeightStream) -> Iterator[WeightsAnnounced]:
    topic = stream.topic.name
    try:
        reader, end = TopicReader(bus, topic, from_begin(bus, topic)), bus.end(topic)
    except TopicMissing:
        return
    for received in reader.read_to(end):
        if isinstance(received.record, WeightsAnnounced):
            yield received.record


@dataclass(slots=True)
class CheckpointAudit:
    """Checks that every checkpoint with a manifest is whole, that its step is in the ledger, that
    the log has the records that it has read, and that the newest is recent enough for the run's
    settings. `check` must be called after `versions` has received the whole log. A restart checks
    the state hash of the tensors.
    """

    store: ObjectStore
    bus: Bus | None
    versions: VersionAudit
    policy: AuditPolicy
    tell: Callable[[str], None]
    result: InvariantResult = field(
        default_factory=lambda: InvariantResult(11, "checkpoints are whole")
    )

    def check(self) -> None:
        whole_steps: list[int] = []
        stored = stored_checkpoints(self.store)
        if not stored and not any(True for _ in self.store.list("weights/")):
            self.result.add_unchecked("the store holds no checkpoints/")
            return
        last_term = max((candidate.id.term for candidate in stored if candidate.whole), default=0)
        for checkpoint in stored:
            checkpoint_id = checkpoint.id
            if not checkpoint.whole:
                self.result.counts["begun"] += 1
                continue
            self.tell(f"checkpoint {checkpoint_id}")
            try:
                wrong = self._wrong(checkpoint_id)
            except ObjectMissing as error:
                # A fenced trainer may write its manifest after retention deleted the files: no
                # restart takes it, since a later term has a checkpoint.
                if checkpoint_id.term < last_term:
                    self.result.counts["begun"] += 1
                    continue
                wrong = str(error)
            # Unless retention removed it meanwhile.
            if wrong and self._is_kept(checkpoint_id):
                self.result.add_violation(wrong, key=f"{checkpoint_id.folder}/")
            elif not wrong:
                whole_steps.append(checkpoint_id.step)
                self.result.counts["whole"] += 1
        self._check_newest(max(whole_steps, default=0))

    def _wrong(self, id_: CheckpointId) -> str:
        """Returns the problem with a checkpoint, "" for none. Raises `ObjectMissing` if a part is
        gone.
        """
        try:
            manifest = checkpoint_manifest(self.store, id_)
            state = TrainerState.decode(checkpoint_state(self.store, id_))
            for file in manifest.tensors.files:
                data = self.store.get(f"{id_.folder}/{file.name}")
                self.result.counts["bytes"] += len(data)
                if (len(data), content_hash(data)) != (file.bytes, file.hash):
                    return f"{file.name} differs from its manifest's hash"
        except CorruptObject as error:
            return str(error)
        if {manifest.step, state.step, id_.step} != {id_.step} or manifest.term != id_.term:
            return f"its state is of step {state.step}, its manifest of step {manifest.step}"
        if self.bus is not None and (missing := missing_records(state, self._end)):
            return f"the log is another one, or was lost: {missing}"
        last = self.versions.last
        states = self.versions.states
        if last is not None and states and min(states) <= id_.step <= last.step:
            return "" if id_.step in states else f"the ledger has no step {id_.step}"
        return ""

    def _end(self, topic: str) -> Mapping[int, int]:
        assert self.bus is not None
        try:
            return self.bus.end(topic)
        except TopicMissing:
            return {}

    def _is_kept(self, id_: CheckpointId) -> bool:
        return any(stored.id == id_ and stored.whole for stored in stored_checkpoints(self.store))

    def _check_newest(self, newest: int) -> None:
        last, every = self.versions.last, self.policy.checkpoint_every
        if last is None or not every or len(self.versions.configurations) > 1:
            return
        # A checkpoint is written before the next `StepDone`.
        due = (last.step - 1) // every * every
        if newest < due:
            what = f"the ledger is at step {last.step}, the newest whole checkpoint at {newest}"
            self.result.add_violation(f"{what}; one is due every {every} steps", key="checkpoints/")
