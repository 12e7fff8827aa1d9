"""Makes a fork: a run that begins at a checkpoint of its parent, which is never written. Its roles
find the state that the parent would have left if it had stopped after that step
(docs/reference/fork.md).
"""

import secrets
import shutil
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from rollstream.consumers.credit import scored_reference
from rollstream.consumers.dispatch.persistence import STATE_KEY, PersistedState
from rollstream.consumers.objective_settings import named_version, past_policies
from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.consumers.trainer.data.groups import GroupIntake
from rollstream.consumers.trainer.learn.base import open_learner
from rollstream.consumers.trainer.ledger import Ledger, hashes_state
from rollstream.consumers.trainer.publisher import copied_state_hash
from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.keep.source import RunSource, check_outside_run
from rollstream.look.index.parentage import (
    ForkParent,
    Parentage,
    PromptsLeft,
    prompts_left,
    write_parentage,
)
from rollstream.look.query.locate import REPLAY_FILE
from rollstream.look.query.own_runs import remember_begun
from rollstream.producers.prompt_source import PromptOrder
from rollstream.revision import code_revision
from rollstream.run.config import config, run_folder
from rollstream.run.config.recorded_configuration import record_configuration
from rollstream.run.config.run_model import MODEL, store_starting_model
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import prompt_order, set_torch_threads
from rollstream.run.roles.train import starting_model, version_files
from rollstream.storage.identity import read_or_create_identity
from rollstream.storage.leases import LeaseCandidate, acquire_lease
from rollstream.storage.starting_model.put import copy_model
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import encode_json
from rollstream.storage.weights.adapters import BASE
from rollstream.storage.weights.checkpoints import (
    Checkpoint,
    newest_checkpoint,
    stored_checkpoints,
    write_checkpoint,
)
from rollstream.storage.weights.fetch import export_version
from rollstream.storage.weights.named_streams import named_streams
from rollstream.storage.weights.pointer import believed_pointer, read_pointer
from rollstream.streams.bus import Bus
from rollstream.streams.foreign_text import whole_number
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Admitted, Configured, GroupClosed, Position, Take
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address
from rollstream.streams.writer import FencedWriter

UNCHANGEABLE_SETTINGS = (
    "model", "trainer.updates_per_step", "trainer.epochs", "trainer.optimiser",
)  # fmt: skip
OWN_SETTINGS = ("run", "bus", "store")
"""Of every fork; they do not count as changes."""


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """The parent with its settings (`before`), the fork's folder with its settings (`now`)."""

    parent: ForkParent
    before: Configuration
    folder: run_folder.RunFolder
    now: Configuration

    def changes(self) -> list[config.SettingChange]:
        """Returns essential settings (those that a run records and compares) in which fork and
        parent differ, without `OWN_SETTINGS`.
        """
        differences = config.setting_changes(
            config.essential_settings(self.before), config.essential_settings(self.now)
        )
        return [change for change in differences if change.key not in OWN_SETTINGS]


def plan_fork(parent: ForkParent, out: Path, overrides: list[str], step: int) -> ForkPlan:
    """Plans the fork at `step`, in the folder `out`, with the parent's settings but for the
    `overrides` (`key=value`). Raises `ConfigurationError` if the fork could not run with them.
    """
    folder = run_folder.RunFolder(out.absolute())
    before = config.load(parent.settings)
    own_settings = [f"run={before.run[:48]}-at-{step}", f"folder={folder.path}"]
    plan = ForkPlan(
        parent, before, folder, config.load(parent.settings, [*own_settings, *overrides])
    )
    _check_settings(plan, step)
    return plan


def check_folders(parent: run_folder.RunFolder | None, out: Path) -> None:
    """Raises `ConfigurationError` if the folder `parent` (None: only its store is left) holds a
    replay, or if `out` is inside it or not empty.
    """
    folder = run_folder.RunFolder(out.absolute())
    if parent is not None and (parent.path / REPLAY_FILE).exists():
        raise ConfigurationError(
            f"{parent.path} holds a replay, whose data are another run's: fork that run"
        )
    if parent is not None:
        check_outside_run(folder.path, parent.path)
    run_folder.require_new(folder.path, "give a new folder with --out", "fork")


def _check_settings(plan: ForkPlan, step: int) -> None:
    before, now = plan.before, plan.now
    if now.run == before.run:
        raise ConfigurationError(f"run: a fork has a name of its own, got {now.run} (the parent's)")
    for change in plan.changes():
        if any(
            change.key == name or change.key.startswith(f"{name}.")
            for name in UNCHANGEABLE_SETTINGS
        ):
            raise ConfigurationError(f"{change}; a checkpoint means nothing under another one")
    if now.trainer.steps <= step:
        raise ConfigurationError(
            f"trainer.steps must be > {step}, where the fork begins, got {now.trainer.steps}; "
            "set its last step with --set trainer.steps=N"
        )
    for policy in (*past_policies(now.trainer), scored_reference(now.trainer)):
        if (number := named_version(policy, step)) not in (None, 0, step):
            raise ConfigurationError(
                f"trainer.reference or trainer.proximal: {policy!r} is the parent's version "
                f"{number} at step {step}, and a fork has none of these; fork at a step where it "
                "is that step's own version, or choose v0 or a model"
            )
    parents = {"bus": plan.parent.bus, "store": plan.parent.store}
    for name, url_of in (("bus", run_folder.bus_url), ("store", run_folder.store_url)):
        url, other = url_of(now, plan.folder.path), parents[name]
        if other is not None and config.url_identity(url) == config.url_identity(other):
            raise ConfigurationError(
                f"{name}: {url} is the parent's; give the fork one of its own with --set {name}=URL"
            )


def find_checkpoint(store: ObjectStore, text: str) -> Checkpoint:
    """The newest readable checkpoint up to the step in `text`, or of all for `latest`. Raises
    `ObjectMissing`, which names the present ones and why some could not be read.
    """
    step = whole_number(text)
    if text != "latest" and step is None:
        raise ConfigurationError(f"--at {text}: give the number of a step, or latest")
    restored = newest_checkpoint(store, step)
    if restored.checkpoint is not None:
        return restored.checkpoint
    kept_ids = (
        ", ".join(str(stored.id) for stored in stored_checkpoints(store) if stored.whole) or "none"
    )
    why = "".join(
        f"; {skipped_id} cannot be read: {reason}" for skipped_id, reason in restored.skipped
    )
    raise ObjectMissing(
        f"no checkpoint up to step {text} is kept; kept are: {kept_ids}{why}; fork at "
        "one of their steps or at latest, and keep more of a later run with checkpoints.keep"
    )


def prompts_left_at(log: Bus, state: TrainerState, had: PromptsLeft) -> PromptsLeft:
    """Returns prompts whose groups were neither trained nor closed up to the checkpoint's step.
    `had` are those that the parent itself began with, `log` is its log or, where that is lost, its
    archive. Raises `ConfigurationError` if a checkpoint of an earlier release needs admissions that
    `log` lacks.
    """
    if state.next_group:
        # The checkpoint names the groups that were open then. Groups that ended in later steps of
        # the parent have not ended for the fork.
        later = _ended_later(log, state)
        return prompts_left(had, state.next_group, state.open_groups, state.ended, later)
    # A checkpoint of an earlier release lacks the number of the next group: the admissions that its
    # trainer had read name it.
    admitted = _admitted_groups(log)
    upto = state.intake_positions()["admissions"]
    if any(log.end("admissions")[p] < at.offset for p, at in upto.items()):
        raise ConfigurationError(
            f"the checkpoint of step {state.step} is of an earlier release, and the archive of "
            "admissions ends before it, so that the prompts left are unknown; fork at an earlier "
            "checkpoint"
        )
    read = [group for at, group in admitted.items() if at.offset < upto[at.partition].offset]
    unread = [group for at, group in admitted.items() if at.offset >= upto[at.partition].offset]
    following = max(read) + 1 if read else min(unread, default=had.first())
    opened = {admitted[group.admitted] for group in state.groups}
    return prompts_left(had, following, opened, state.ended, _ended_later(log, state))


def _admitted_groups(log: Bus) -> dict[Address, int]:
    reader = TopicReader(log, "admissions", from_begin(log, "admissions"))
    return {
        received.address: received.record.group
        for received in reader.read_to(log.end("admissions"))
        if isinstance(received.record, Admitted)
    }


def _ended_later(log: Bus, state: TrainerState) -> set[int]:
    """Returns groups that the ledger ends in a step after the checkpoint's."""
    groups: set[int] = set()
    if log.end("ledger")[0] <= state.ledger.offset:
        return groups
    # Takes of later steps may be older than the checkpoint, if a trainer that repeated steps wrote
    # it; then its ledger position is before them (`TrainerState.ahead`).
    for received in TopicReader(log, "ledger", {0: state.ledger}).read_to(log.end("ledger")):
        match received.record:
            case Take() as take if take.step > state.step:
                groups |= {group.group for group in take.groups}
            case GroupClosed() as closed if closed.step > state.step:
                groups.add(closed.group)
            case _:
                pass
    return groups


def make_fork(
    plan: ForkPlan, checkpoint: Checkpoint, left_prompts: PromptsLeft, parent: RunSource
) -> Parentage:
    """Make the fork as planned, from this checkpoint of the opened `parent` and with the prompts
    `left_prompts`; it is complete when this function returns. Raises `ConfigurationError` if the
    fork's log or store already holds a run.

    1. Make the fork's folder and copy the starting model's files.
    2. Write the state that a trainer leaves after the checkpoint's step: the version of that step
       as an anchor, the checkpoint, and `Configured` in the ledger.
    3. Write the state of dispatch.
    4. Append the prompts whose groups are generated again, and the first prompt after them; the
       prompt source continues after it.
    5. Store the parentage.
    6. Write `config.json` last: a folder without it is no run, so a killed process leaves no fork.
    """
    c, folder, step = plan.now, plan.folder, checkpoint.id.step
    folder.path.mkdir(parents=True, exist_ok=True)
    store = run_folder.store_for_writing(c, folder.path)
    with closing(run_folder.open_run_log_for_writing(c, folder.path)) as bus:
        bus.create(catalogue())
        _check_empty(bus, store, c)
        _copy_model(plan, store, parent)  # 1
        with ExitStack() as roles:
            trainer = roles.enter_context(_held_lease_term(store, "trainer"))
            prompts = roles.enter_context(_held_lease_term(store, "prompts"))
            state_hash = _write_trainer_state(bus, store, plan, checkpoint, trainer)  # 2
            _write_dispatch_state(store, c, step, left_prompts)  # 3
            _append_prompts(bus, prompt_order(c, folder.path), left_prompts, prompts)  # 4
        changes = {change.key: (change.before, change.now) for change in plan.changes()}
        parentage = Parentage(
            plan.before.run, plan.parent.where, str(checkpoint.id), step, state_hash,
            left_prompts, changes,
        )  # fmt: skip
        write_parentage(store, parentage)  # 5
    run_folder.write_configuration(folder, c)  # 6
    return parentage


def _check_empty(bus: Bus, store: ObjectStore, c: Configuration) -> None:
    if read_pointer(store) is not None or named_streams(store):
        raise ConfigurationError(f"store: {c.store} holds a run already; give the fork a new one")
    for topic in ("ledger", "prompts", "admissions"):
        if any(bus.end(topic).values()):
            raise ConfigurationError(f"bus: {c.bus} holds a run already; give the fork a new one")


def _copy_model(plan: ForkPlan, store: ObjectStore, parent: RunSource) -> None:
    assert parent.store is not None
    # An earlier release stored no model: then that of `model.path` or of the parent's folder, or,
    # if only its store is left, its believed version (with LoRA, the base of its adapters).
    if copy_model(parent.store, store, plan.now.run) is None:
        _copy_model_files(plan, parent)
        store_starting_model(store, plan.now, plan.folder.path)


def _copy_model_files(plan: ForkPlan, parent: RunSource) -> None:
    if plan.now.model.path is not None:
        return
    if plan.parent.folder is not None:
        for name, _ in parent.location.files.walk(MODEL, skip=lambda name: False):
            target = plan.folder.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with parent.location.files.open(name) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)
        return
    store = parent.store
    assert store is not None
    pointer = believed_pointer(store)
    if pointer is None or pointer.version is None:
        raise ConfigurationError(f"{plan.parent.where} holds no version, so no model to start")
    start = BASE if plan.now.model.lora.rank else pointer.version
    export_version(store, start, plan.folder.model, plan.now.weights.shard_bytes)


@contextmanager
def _held_lease_term(store: ObjectStore, role: str) -> Generator[int]:
    lease = acquire_lease(store, LeaseCandidate(role, "fork", secrets.token_hex(16)), wait_s=0.0)
    yield lease.term
    lease.release()


def _write_trainer_state(
    bus: Bus, store: ObjectStore, plan: ForkPlan, checkpoint: Checkpoint, term: int
) -> str:
    c, step = plan.now, checkpoint.id.step
    disable_progress_bar()  # of transformers: it would mix with the command's output
    set_torch_threads(c.trainer.threads)
    learner = open_learner(starting_model(c, plan.folder.path), c.trainer)
    learner.load_state(checkpoint.tensors)
    writer = FencedWriter(bus, "weights", "trainer", term)
    files = version_files(c, plan.folder.path)
    versions = VersionWriter(store, writer, c.run, term, c.weights, files, lambda: ())
    versions.open()
    versions.publish(step, learner.snapshot(c.weights.dtype))
    state = TrainerState(
        step=step,
        updates=learner.updates,
        ledger=Position(),
        positions={
            topic: {str(p): at for p, at in from_begin(bus, topic).items()}
            for topic in GroupIntake.TOPICS
        },
        groups=(),
        counts={},
        configuration_hash=config.fingerprint(c),
    )
    tensors = learner.state()
    write_checkpoint(store, step, term, tensors, state.encode())
    ledger = Ledger(bus, term)
    ledger.open(Position())
    origin = f"{plan.before.run} {checkpoint.id}"
    run_id = read_or_create_identity(store, c.run).id
    remember_begun(run_id, c.model_dump(mode="json"), plan.folder.path)
    record_configuration(store, c)
    ledger.append(
        [
            Configured(
                config.fingerprint(c), code_revision(), step, forked_from=origin, run_id=run_id
            )
        ]
    )
    hashed = hashes_state(learner.state_bytes, None)
    state_hash = learner.state_hash() if hashed else copied_state_hash(tensors)
    learner.close()
    return state_hash


def _write_dispatch_state(
    store: ObjectStore, c: Configuration, step: int, left_prompts: PromptsLeft
) -> None:
    # All groups so far count as trained and none is open, so dispatch admits no burst of groups.
    # Term 0: the fork's first dispatch takes it over.
    trained = step * c.trainer.groups_per_step
    begin = {"ledger": {"0": Position()}}
    state = PersistedState(
        0, begin, admitted=trained, trained=trained, next_group=left_prompts.first()
    )
    store.create(STATE_KEY, encode_json(state))


def _append_prompts(bus: Bus, order: PromptOrder, left_prompts: PromptsLeft, term: int) -> None:
    writer = FencedWriter(bus, "prompts", "prompts", term)
    writer.open()
    prompts = [order.at(group) for group in (*left_prompts.again, left_prompts.on)]
    writer.append([(str(prompt.group), prompt) for prompt in prompts])
