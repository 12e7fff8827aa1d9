"""Puts a trainer together: newest checkpoint, then the ledger behind it, then live (DESIGN.md,
Trainer).

1. Fence earlier terms in the store (`latest.json`) and in the topics (`Opened`).  2. Load the
  newest whole checkpoint, or begin with version 0.  3. Read the ledger from the checkpoint's
  position to the own `Opened`.  4. Open the checkpoint's groups again; groups that were closed
  since are ended before anything is read. What the ledger holds is trained again by the loop
  itself, on the recorded trajectories.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from consumers.settings import TrainerSettings
from consumers.trainer.checkpoint import TrainerState, restore_intake, trainer_state
from consumers.trainer.choice import load_choice
from consumers.trainer.forgetting import Forgetting
from consumers.trainer.intake import Intake
from consumers.trainer.learning import Learning, open_learner
from consumers.trainer.ledger import Ledger, Recorded
from consumers.trainer.paced_learner import PacedModel
from consumers.trainer.patience import Patience
from consumers.trainer.pins import HeldVersions, PinnedVersions
from consumers.trainer.poison import supersede
from consumers.trainer.prepare import Rule
from consumers.trainer.publisher import Publisher, Retention
from consumers.trainer.recall import Recall
from consumers.trainer.service import Trainer
from consumers.trainer.takes import Takes
from consumers.trainer.versions import VersionWriter
from storage.checkpoints import newest_checkpoint, write_checkpoint
from storage.metrics import MetricsFile
from storage.objects import ObjectStore
from storage.settings import CheckpointSettings, WeightsSettings
from streams.admissible import believed_terms
from streams.bus import Bus
from streams.errors import ConfigurationError
from streams.reader import from_begin
from streams.records import Configured, Position, Version
from streams.writer import FencedWriter

if TYPE_CHECKING:  # see learning.py
    from consumers.trainer.sharded.learner import ShardedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a term of the trainer says of itself in the ledger."""

    run: str
    term: int
    configuration_hash: str
    code_revision: str
    accept: Callable[[str], bool] = lambda before: True
    """Given the hash of another configuration that the run had: whether the difference is accepted
    and to be recorded; raises `ConfigurationError` where it is not.
    """
    run_id: str = ""
    """Drawn at the begin of the run; a ledger of another id belongs to another run."""


@dataclass(frozen=True, slots=True)
class Begin:
    """What a trainer starts from when there is no checkpoint, and the files that every version
    carries.
    """

    model: "PreTrainedModel | PacedModel | ShardedModel"
    model_files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings that a trainer obeys."""

    trainer: TrainerSettings
    rule: Rule
    weights: WeightsSettings
    checkpoints: CheckpointSettings
    truncate: bool = False
    """Forget records that nothing needs any more …"""
    archived: tuple[str, ...] = ()
    """… once they are archived, in these topics."""


def build_trainer(
    bus: Bus,
    store: ObjectStore,
    plan: Plan,
    begin: Begin,
    provenance: Provenance,
    metrics: MetricsFile,
    monotonic: Callable[[], float] = time.monotonic,
) -> Trainer:
    """A trainer that is about to train the step after the newest checkpoint."""
    choose = load_choice(plan.trainer.choose)  # refused before anybody is fenced
    versions = _fence_store(bus, store, plan, begin, provenance, monotonic)  # 1
    learner = open_learner(begin.model, plan.trainer)
    state = _load_newest(store, learner)  # 2
    recall = Recall(bus, store, provenance.run)
    ledger = Ledger(recall, provenance.term)
    recorded = ledger.open(Position() if state is None else state.ledger)  # 1 (`Opened`), 3
    accepted = _accepted(provenance, recorded, state)
    positions = _begin_positions(recall) if state is None else state.intake_positions()
    intake = Intake(recall, positions, monotonic, plan.rule.names)
    if state is None:
        state = _start(store, versions, learner, intake, provenance, plan)  # 2
    _restore_groups(ledger, intake, recorded, state)  # 4
    _record_configured(ledger, provenance, recorded, state.step, accepted)
    patience = Patience(plan.rule.names)
    takes = Takes(
        recall, plan.trainer, plan.rule, choose, intake, ledger, learner, patience,
        lambda: versions.highest, _terms(state, recorded, versions.highest, provenance.term),
    )  # fmt: skip
    forgetting = Forgetting(bus, store, plan.archived) if plan.truncate else None
    retention = Retention(plan.checkpoints.keep, forgetting)
    return Trainer(
        takes,
        Publisher(store, versions, ledger, metrics, retention, timer=monotonic),
        recorded,
        state.step,
        provenance.term,
        plan.weights.dtype,
        plan.checkpoints.every,
        provenance.configuration_hash,
        monotonic,
    )


def _fence_store(
    bus: Bus,
    store: ObjectStore,
    plan: Plan,
    begin: Begin,
    provenance: Provenance,
    monotonic: Callable[[], float],
) -> VersionWriter:
    """The writer of versions; no earlier term can publish one after it."""
    announcements = FencedWriter(bus, "weights", "trainer", provenance.term)
    pins = (
        PinnedVersions(bus, store, monotonic)
        if plan.rule.keep_version
        else HeldVersions(bus, monotonic)
    )
    versions = VersionWriter(
        store, announcements, provenance.run, provenance.term, plan.weights, begin.model_files, pins
    )
    versions.open()
    return versions


def _load_newest(store: ObjectStore, learner: Learning) -> TrainerState | None:
    """The newest whole checkpoint into the learner; None when there is none yet."""
    restored = newest_checkpoint(store)
    for skipped, reason in restored.skipped:
        log.warning("checkpoint %s is passed over: %s", skipped, reason)
    if restored.checkpoint is None:
        return None
    learner.load_state(restored.checkpoint.tensors)
    return TrainerState.decode(restored.checkpoint.state)


def _begin_positions(recall: Recall) -> dict[str, dict[int, Position]]:
    """Of the first records; where every checkpoint is gone and the log has forgotten, of the first
    archived ones.
    """
    is_cut = any(offset for topic in Intake.TOPICS for offset in recall.begin(topic).values())
    reach = recall.whole() if is_cut else recall
    return {topic: from_begin(reach, topic) for topic in Intake.TOPICS}


def _start(
    store: ObjectStore,
    versions: VersionWriter,
    learner: Learning,
    intake: Intake,
    provenance: Provenance,
    plan: Plan,
) -> TrainerState:
    """Version 0 and the checkpoint of step 0; a crash in between repeats both with the
    same bytes.
    """
    versions.publish(0, learner.snapshot(plan.weights.dtype))
    state = trainer_state(0, 0, Position(), intake, provenance.configuration_hash)
    write_checkpoint(store, 0, provenance.term, learner.state(), state.encode())
    return state


def _restore_groups(
    ledger: Ledger, intake: Intake, recorded: Recorded, state: TrainerState
) -> None:
    """The checkpoint's groups are open again, without those that the ledger ends."""
    restore_intake(intake, state)
    _give_up(ledger, recorded)
    _end_closed(intake, recorded, state.step)


def _end_closed(intake: Intake, recorded: Recorded, step: int) -> None:
    """Groups that the ledger closed or took after the checkpoint are not open, admitted later or
    not.
    """
    for closed in recorded.closed:
        if closed.step > step:
            intake.end(closed.group)
    for takes in recorded.takes.values():
        for take in takes:
            for group in take.groups:
                if take.step > step:
                    intake.end(group.group)


def _terms(
    state: TrainerState, recorded: Recorded, highest: Version | None, term: int
) -> tuple[tuple[int, int], ...]:
    """Who published which version: what the checkpoint knew, the steps done since, the believed
    version (its `StepDone` may be missing), and this term for every number above that.
    """
    assert highest is not None, "version 0 is published before anything is trained"
    own = Version(highest.number + 1, term)
    return believed_terms([*recorded.believed.values(), highest, own], state.terms)


def _give_up(ledger: Ledger, recorded: Recorded) -> None:
    """Supersede the takes that no trainer can compute, and end their groups (`poison.py`). A crash
    between the two records leaves groups without an end: the next start appends what is missing.
    """
    hopeless = recorded.attempts.hopeless()
    given_up = supersede(recorded.takes, recorded.done, recorded.voided, hopeless)
    for one in given_up:
        log.error(
            "step %d: take %s is superseded and group %s ends as poisoned: %s",
            one.step,
            one.micro_batches,
            one.poisoned,
            one.detail,
        )
    closings = recorded.voided.closings(closed.group for closed in recorded.closed)
    ledger.append([*given_up, *closings])
    recorded.closed += closings
    for place, takes in recorded.takes.items():
        recorded.takes[place] = [recorded.voided.effective(take) for take in takes]


def _accepted(provenance: Provenance, recorded: Recorded, state: TrainerState | None) -> bool:
    """Whether the run goes on under another configuration than its last trainer had."""
    if recorded.configured is not None:
        _check_run(provenance, recorded.configured)
        before = recorded.configured.configuration_hash
    elif state is not None:
        before = state.configuration_hash
    else:
        return False
    return before != provenance.configuration_hash and provenance.accept(before)


def _check_run(provenance: Provenance, found: Configured) -> None:
    """Log and store are of one run. What this stops: a URL with another run's prefix, whose takes
    would be trained again on this run's checkpoint.
    """
    if "" not in (found.run_id, provenance.run_id) and found.run_id != provenance.run_id:
        raise ConfigurationError(
            f"the ledger is of the run with id {found.run_id}, the store of the one with id "
            f"{provenance.run_id}; give the bus and the store of one run"
        )


def _record_configured(
    ledger: Ledger, provenance: Provenance, recorded: Recorded, step: int, accepted: bool
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
        "trainer term %d goes on after step %d; the ledger has %d steps to repeat",
        provenance.term,
        step,
        max(0, recorded.steps() - step),
    )
