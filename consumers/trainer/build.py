"""Builds a trainer that continues from the newest checkpoint and the ledger's records after it
(docs/reference/invariants.md, A trainer's step). `build_trainer` (1) fences earlier terms in the
store (`latest.json`) and in the topics (`Opened`), (2) loads the newest complete checkpoint, or
publishes version 0, (3) reads the ledger from the checkpoint's position up to this term's `Opened`,
and (4) opens the checkpoint's groups again, except those that the ledger ends. The loop (`loop.py`)
repeats the recorded steps first.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.checkpoint import (
    TrainerState,
    ledger_begin,
    missing_records,
    restore_intake,
    trainer_state,
)
from rollstream.consumers.trainer.data.earlier_rules import earlier_rules
from rollstream.consumers.trainer.data.groups import GroupIntake
from rollstream.consumers.trainer.data.poisoned_takes import plan_superseded
from rollstream.consumers.trainer.data.selection import AnnotationWatch, load_choice
from rollstream.consumers.trainer.data.training_rule import TrainingRule
from rollstream.consumers.trainer.learn.base import LearnableModel, Learner, open_learner
from rollstream.consumers.trainer.ledger import Ledger, LedgerTail
from rollstream.consumers.trainer.loop import Trainer
from rollstream.consumers.trainer.past_versions import NeededVersions, PublishedVersions
from rollstream.consumers.trainer.publisher import CheckpointRetention, StepPublisher
from rollstream.consumers.trainer.retention import (
    ArchiveBackedBus,
    HeldVersions,
    LogTruncation,
    PinnedVersions,
)
from rollstream.consumers.trainer.takes import TakeFeeder
from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.errors import ConfigurationError
from rollstream.storage.claim_check import BlobCollector
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.settings import CheckpointSettings, WeightsSettings
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.weights.checkpoints import (
    Checkpoint,
    CheckpointId,
    open_checkpoint,
    restore_first,
    stored_checkpoints,
    write_checkpoint,
)
from rollstream.storage.weights.retention import PinnedByReaders
from rollstream.streams.admissible import believed_terms
from rollstream.streams.bus import Bus
from rollstream.streams.reader import from_begin
from rollstream.streams.records import Configured, Position
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter

if TYPE_CHECKING:  # see learn/base.py
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Provenance:
    run: str
    term: int
    configuration_hash: str
    code_revision: str
    accept: Callable[[str], bool] = lambda before: True
    """Called with the previous hash if the run's last trainer had another configuration. Returns
    whether the user accepted the change, to be recorded so; raises `ConfigurationError` if it is
    refused.
    """
    run_id: str = ""


class RankGroup(Protocol):
    """The processes that share a model with this one, their leader."""

    def announce_start(
        self, term: int, model: str, settings: str, checkpoints: Iterable[CheckpointId]
    ) -> None: ...

    def together(self) -> AbstractContextManager[None]:
        """A block that fails in every process if it fails in one."""
        ...


@dataclass(frozen=True, slots=True)
class InitialModel:
    """The model of a run without a checkpoint; its files (configuration, tokenizer) are in every
    version.
    """

    model: "PreTrainedModel | LearnableModel"
    model_files: Mapping[str, bytes]
    ranks: RankGroup | None = None
    """The ranks that share the model; None if this process has it alone."""
    model_hash: str = ""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """`rule` decides which samples are trained."""

    trainer: TrainerSettings
    rule: TrainingRule
    weights: WeightsSettings
    checkpoints: CheckpointSettings
    truncate: bool = False
    archived: tuple[str, ...] = ()
    """Topics whose records are truncated only once they are archived."""

    def hash_with(self, model_files: Mapping[str, bytes]) -> str:
        """Returns a hash: by it ranks compare their settings and files."""
        files = sorted((name, content_hash(data)) for name, data in model_files.items())
        return content_hash(repr((self, files)).encode())


def build_trainer(
    bus: Bus,
    store: ObjectStore,
    plan: TrainerPlan,
    initial: InitialModel,
    provenance: Provenance,
    metrics: MetricsFile,
    monotonic: Callable[[], float] = time.monotonic,
) -> Trainer:
    """Returns a trainer whose next step follows the newest checkpoint; all earlier terms are
    fenced. The numbers in the body are those of the module's docstring.
    """
    choose = load_choice(plan.trainer.choose)  # a bad setting must fail before the fencing
    versions = _fence_store(bus, store, plan, initial, provenance, monotonic)  # 1
    checkpoints = [stored.id for stored in reversed(stored_checkpoints(store))]
    if initial.ranks is not None:
        settings = plan.hash_with(initial.model_files)
        initial.ranks.announce_start(provenance.term, initial.model_hash, settings, checkpoints)
    past = PublishedVersions(lambda: (store,), plan.weights.dtype)
    learner = open_learner(initial.model, plan.trainer, past)
    state = load_first(store, learner, checkpoints, initial.ranks)  # 2
    _check_log(bus, state)
    log_bus = ArchiveBackedBus(bus, store, provenance.run)
    ledger = Ledger(log_bus, provenance.term)
    recorded = ledger.open(*ledger_begin(state))  # 1 (`Opened`), 3
    _check_steps(versions, recorded, state)
    accepted = _is_change_accepted(provenance, recorded, state)
    positions = _begin_positions(log_bus) if state is None else state.intake_positions()
    intake = GroupIntake(log_bus, positions, monotonic, plan.rule.names)
    if state is None:
        state = trainer_state(0, 0, Position(), intake, provenance.configuration_hash)
        # A crash between the two writes is harmless: the next start writes the same bytes.
        publish_step_0(store, versions, learner, plan.weights.dtype, state.encode())  # 2
    _restore_groups(ledger, intake, recorded, state)  # 4
    _record_configured(ledger, provenance, recorded, state.step, accepted)
    take_feeder = TakeFeeder(
        bus=log_bus,
        settings=plan.trainer,
        rule=plan.rule,
        earlier_rules=earlier_rules(store, plan.rule, recorded.taken_under),
        learner=learner,
        terms=publishing_terms(state.terms, recorded, versions),
        out_of_memory=recorded.attempts.out_of_memory,
        choose=choose,
        intake=intake,
        ledger=ledger,
        annotation_watch=AnnotationWatch(plan.rule.names),
        believed=lambda: versions.highest,
    )
    blobs = BlobCollector(bus, store, monotonic)
    truncation = LogTruncation(bus, store, plan.archived, blobs) if plan.truncate else None
    retention = CheckpointRetention(plan.checkpoints.keep, truncation)
    return Trainer(
        take_feeder=take_feeder,
        publisher=StepPublisher(store, versions, ledger, metrics, retention, timer=monotonic),
        recorded=recorded,
        step=state.step,
        term=provenance.term,
        dtype=plan.weights.dtype,
        checkpoint_every=plan.checkpoints.every,
        configuration_hash=provenance.configuration_hash,
        monotonic=monotonic,
    )


def _fence_store(
    bus: Bus,
    store: ObjectStore,
    plan: TrainerPlan,
    initial: InitialModel,
    provenance: Provenance,
    monotonic: Callable[[], float],
) -> VersionWriter:
    # Fenced at `latest.json` (`versions.open`) and in the topic `weights`, earlier terms can
    # publish no version any more.
    announcements = FencedWriter(bus, "weights", "trainer", provenance.term)
    by_rollouts = (
        PinnedVersions(bus, store, monotonic)
        if plan.rule.keep_version
        else HeldVersions(bus, monotonic)
    )
    by_readers = PinnedByReaders(store, monotonic)
    versions = VersionWriter(
        store,
        announcements,
        provenance.run,
        provenance.term,
        plan.weights,
        initial.model_files,
        lambda: by_rollouts() | by_readers(),
        to_continue=NeededVersions(store, plan.trainer, plan.rule.max_lag),
    )
    versions.open()
    return versions


def load_first(
    store: ObjectStore,
    learner: Learner,
    checkpoints: Iterable[CheckpointId],
    ranks: RankGroup | None = None,
) -> TrainerState | None:
    """Loads the first of these checkpoints that is complete and undamaged into the learner, on all
    `ranks` the same, and returns the trainer's state in it.
    """

    def restore(checkpoint_id: CheckpointId) -> Checkpoint:
        with nullcontext() if ranks is None else ranks.together():
            checkpoint = open_checkpoint(store, checkpoint_id)
        TrainerState.decode(checkpoint.state)  # a checkpoint without it is skipped
        learner.load_state(checkpoint.tensors)
        return checkpoint

    restored = restore_first(checkpoints, restore)
    for skipped, reason in restored.skipped:
        log.warning("checkpoint %s skipped: %s", skipped, reason)
    if restored.checkpoint is None:
        return None
    return TrainerState.decode(restored.checkpoint.state)


def _begin_positions(log_bus: ArchiveBackedBus) -> dict[str, dict[int, Position]]:
    # A truncated log had checkpoints, which are lost: then the archive has the first records.
    is_cut = any(offset for topic in GroupIntake.TOPICS for offset in log_bus.begin(topic).values())
    readable = log_bus.with_archive() if is_cut else log_bus
    return {topic: from_begin(readable, topic) for topic in GroupIntake.TOPICS}


def publish_step_0(
    store: ObjectStore,
    versions: VersionWriter,
    learner: Learner,
    dtype: str,
    state: Mapping[str, Any] | None,
) -> None:
    """Writes version 0, then the checkpoint of step 0; a rank that does not lead writes its part
    and has no `state`.
    """
    versions.publish(0, learner.snapshot(dtype))
    write_checkpoint(store, 0, versions.term, learner.state(), state)


def _restore_groups(
    ledger: Ledger, intake: GroupIntake, recorded: LedgerTail, state: TrainerState
) -> None:
    # All before any completion is read.
    restore_intake(intake, state)
    _supersede_hopeless(ledger, recorded)
    _end_closed(intake, recorded, state.step)


def _end_closed(intake: GroupIntake, recorded: LedgerTail, step: int) -> None:
    # Also groups whose admission is not read yet.
    for closed in recorded.closed:
        if closed.step > step:
            intake.end(closed.group)
    for takes in recorded.takes.values():
        for take in takes:
            for group in take.groups:
                if take.step > step:
                    intake.end(group.group)


def publishing_terms(
    before: tuple[tuple[int, int], ...], recorded: LedgerTail, versions: VersionWriter
) -> tuple[tuple[int, int], ...]:
    """The term that published each believed version; this term publishes all higher numbers."""
    highest = versions.highest
    assert highest is not None, "version 0 is published before anything is trained"
    next_version = Version(highest.number + 1, versions.term)
    # From the checkpoint's table (`before`), the steps done since, and the believed version, whose
    # `StepDone` may be missing.
    return believed_terms([*recorded.believed.values(), highest, next_version], before)


def _supersede_hopeless(ledger: Ledger, recorded: LedgerTail) -> None:
    # `data/poisoned_takes.py`. A crash between a `Superseded` and the `GroupClosed` of its groups
    # leaves groups without an end; the next start appends the missing records here.
    hopeless = recorded.attempts.takes_to_give_up()
    given_up = plan_superseded(recorded.takes, recorded.done, recorded.superseded, hopeless)
    for record in given_up:
        log.error(
            "step %d: take %s is superseded and group %s ends as poisoned: %s",
            record.step,
            record.micro_batches,
            record.poisoned,
            record.detail,
        )
    closings = recorded.superseded.closings(closed.group for closed in recorded.closed)
    ledger.append([*given_up, *closings])
    recorded.closed += closings
    for place, takes in recorded.takes.items():
        recorded.takes[place] = [recorded.superseded.effective(take) for take in takes]


def _check_log(bus: Bus, state: TrainerState | None) -> None:
    if state is not None and (missing := missing_records(state, bus.end)):
        raise _log_refused(missing)


def _check_steps(versions: VersionWriter, recorded: LedgerTail, state: TrainerState | None) -> None:
    last = max(0 if state is None else state.step, *recorded.done, 0)
    # Only the newest version may lack its `StepDone`: the trainer died between the two.
    if versions.highest is not None and versions.highest.number > last + 1:
        newest = f"the store's newest version is {versions.highest}"
        raise _log_refused(f"{newest}, and the ledger ends with step {last}")


def _log_refused(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the log is not that of the store, or was lost: {why}; give the run's own log (bus), "
        "restore a backup of the run, or fork the run from its store"
    )


def _is_change_accepted(
    provenance: Provenance, recorded: LedgerTail, state: TrainerState | None
) -> bool:
    if recorded.configured is not None:
        check_run(provenance, recorded.configured)
        before = recorded.configured.configuration_hash
    elif state is not None:
        before = state.configuration_hash
    else:
        return False
    return before != provenance.configuration_hash and provenance.accept(before)


def check_run(provenance: Provenance, configured: Configured) -> None:
    """Raises `ConfigurationError` if the ledger is another run's, as under a URL with a wrong
    prefix.
    """
    if "" not in (configured.run_id, provenance.run_id) and configured.run_id != provenance.run_id:
        raise ConfigurationError(
            f"the ledger is of the run with id {configured.run_id}, the store of the run with id "
            f"{provenance.run_id}; give the bus and the store of one run"
        )


def _record_configured(
    ledger: Ledger, provenance: Provenance, recorded: LedgerTail, step: int, accepted: bool
) -> None:
    ledger.append(
        [
            Configured(
                configuration_hash=provenance.configuration_hash,
                code_revision=provenance.code_revision,
                resumed_from=step,
                accepted=accepted,
                run_id=provenance.run_id,
            )
        ]
    )
    log.info(
        "trainer term %d resumes after step %d; the ledger has %d steps to repeat",
        provenance.term,
        step,
        max(0, recorded.steps() - step),
    )
