"""Invariant 11, for checkpoints: every checkpoint with a manifest is whole, its step is in the
ledger, and the newest is not older than the run's settings imply.

One file is in memory at a time. A checkpoint that retention removes meanwhile is skipped. Whether a
checkpoint's tensors have the state hash of the ledger is not checked here: a restart checks it by
repeating the steps after it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.audit.tally import InvariantResult
from rollstream.consumers.audit.versions import VersionAudit
from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.storage.checkpoints import CheckpointId, checkpoint_manifest, checkpoint_state, stored_checkpoints
from rollstream.storage.stores.hashing import content_hash
from rollstream.storage.stores.base import ObjectStore
from rollstream.errors import CorruptObject, ObjectMissing


@dataclass(slots=True)
class CheckpointAudit:
    """Checks the store; `check` must be called after the folds have read the log."""

    store: ObjectStore
    versions: VersionAudit
    policy: AuditPolicy
    tell: Callable[[str], None]
    tally: InvariantResult = field(default_factory=lambda: InvariantResult(11, "checkpoints are whole"))

    def check(self) -> None:
        """Check every checkpoint under `checkpoints/`."""
        whole: list[int] = []
        stored = stored_checkpoints(self.store)
        if not stored and not any(True for _ in self.store.list("weights/")):
            self.tally.cannot("the store holds no checkpoints/")
            return
        for checkpoint in stored:
            one = checkpoint.id
            if not checkpoint.whole:
                self.tally.counts["begun"] += 1
                continue
            self.tell(f"checkpoint {one}")
            wrong = self._wrong(one)
            if wrong and self._is_kept(one):
                self.tally.offend(wrong, key=f"{one.folder}/")
            elif not wrong:
                whole.append(one.step)
                self.tally.counts["whole"] += 1
        self._check_newest(max(whole, default=0))

    def _wrong(self, one: CheckpointId) -> str:
        try:
            manifest = checkpoint_manifest(self.store, one)
            state = TrainerState.decode(checkpoint_state(self.store, one))
            for file in manifest.tensors.files:
                data = self.store.get(f"{one.folder}/{file.name}")
                self.tally.counts["bytes"] += len(data)
                if (len(data), content_hash(data)) != (file.bytes, file.hash):
                    return f"{file.name} differs from its manifest's hash"
        except (ObjectMissing, CorruptObject, msgspec.ValidationError) as error:
            return str(error)
        if {manifest.step, state.step, one.step} != {one.step} or manifest.term != one.term:
            return f"its state is of step {state.step}, its manifest of step {manifest.step}"
        last = self.versions.last
        made = self.versions.states
        if last is not None and made and min(made) <= one.step <= last.step:
            return "" if one.step in made else f"the ledger has no step {one.step}"
        return ""

    def _is_kept(self, one: CheckpointId) -> bool:
        """False if retention removed it meanwhile."""
        return any(stored.id == one and stored.whole for stored in stored_checkpoints(self.store))

    def _check_newest(self, newest: int) -> None:
        """Check that a due checkpoint exists: it is written before the next `StepDone`."""
        last, every = self.versions.last, self.policy.checkpoint_every
        if last is None or not every or len(self.versions.configurations) > 1:
            return
        due = (last.step - 1) // every * every
        if newest < due:
            what = f"the ledger is at step {last.step}, the newest whole checkpoint at {newest}"
            self.tally.offend(f"{what}; one is due every {every} steps", key="checkpoints/")
