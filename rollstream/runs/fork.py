"""Makes a fork: a run whose trainer, dispatch and prompt source find what they would have left
behind, had they stopped after the checkpoint's step.

1. Its folder and the starting model's files.  2. The trainer's first term: the version of that
step as an anchor, the checkpoint, `Configured` in the ledger.  3. What dispatch would have kept:
that many groups trained, none open, so that no burst follows.  4. The prompts that are left, up to
the first new one; the prompt source goes on behind it.  5. Where it comes from.  6. `config.json`,
last: a folder without it is no run. Who is killed on the way has made none.
"""

import secrets
import shutil
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager

from transformers.utils.logging import disable_progress_bar

from rollstream.consumers.dispatch.persistence import STATE_KEY as DISPATCH_KEY
from rollstream.consumers.dispatch.persistence import PersistedState
from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.consumers.trainer.data.groups import GroupIntake
from rollstream.consumers.trainer.learn.base import open_learner
from rollstream.consumers.trainer.ledger import Ledger
from rollstream.consumers.trainer.versions import VersionWriter
from rollstream.producers.prompt_source import PromptOrder
from rollstream.config.settings import Configuration
from rollstream.config.config import fingerprint
from rollstream.config.run_folder import model_folder, open_run_log_for_writing, write_configuration, store_for_writing
from rollstream.runs.forking import ForkPlan
from rollstream.config.identity import read_or_create_identity, record_configuration
from rollstream.runs.parentage import Parentage, PromptsLeft, write_parentage
from rollstream.revision import code_revision
from rollstream.roles.context import set_torch_threads
from rollstream.roles.run_task import prompt_order
from rollstream.roles.initial_model import starting_model
from rollstream.roles.train_role import config_and_tokenizer_files
from rollstream.storage.checkpoints import Checkpoint, write_checkpoint
from rollstream.storage.stores.json_objects import encode_json
from rollstream.storage.leases import LeaseCandidate, acquire_lease
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.pointer import read_pointer
from rollstream.streams.bus import Bus
from rollstream.errors import ConfigurationError
from rollstream.streams.reader import from_begin
from rollstream.streams.records import Configured, Position
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import FencedWriter


def make_fork(wanted: ForkPlan, checkpoint: Checkpoint, left: PromptsLeft) -> Parentage:
    """The fork is whole when this returns; `ConfigurationError` where its log or store holds
    something already.
    """
    c, folder, step = wanted.now, wanted.folder, checkpoint.id.step
    folder.path.mkdir(parents=True, exist_ok=True)
    store = store_for_writing(c, folder.path)
    with closing(open_run_log_for_writing(c, folder.path)) as bus:
        bus.create(catalogue())
        _check_empty(bus, store, c)
        _copy_model(wanted)  # 1
        with ExitStack() as roles:
            trainer = roles.enter_context(_held_lease_term(store, "trainer"))
            prompts = roles.enter_context(_held_lease_term(store, "prompts"))
            state_hash = _write_trainer_state(bus, store, wanted, checkpoint, trainer)  # 2
            _write_dispatch_state(store, c, step, left)  # 3
            _append_prompts(bus, prompt_order(c, folder.path), left, prompts)  # 4
        changes = {change.key: (change.before, change.now) for change in wanted.changes()}
        parentage = Parentage(
            wanted.before.run, str(wanted.parent.path), str(checkpoint.id), step, state_hash,
            left, changes,
        )  # fmt: skip
        write_parentage(store, parentage)  # 5
    write_configuration(folder, c)  # 6
    return parentage


def _check_empty(bus: Bus, store: ObjectStore, c: Configuration) -> None:
    if read_pointer(store) is not None:
        raise ConfigurationError(f"store: {c.store} holds a run already; give the fork a new one")
    for topic in ("ledger", "prompts", "admissions"):
        if any(bus.end(topic).values()):
            raise ConfigurationError(f"bus: {c.bus} holds a run already; give the fork a new one")


def _copy_model(wanted: ForkPlan) -> None:
    """Configuration and tokenizer are read there when roles start; a model that has a path of its
    own stays where it is.
    """
    if wanted.now.model.path is None:
        shutil.copytree(wanted.parent.model, wanted.folder.model)


@contextmanager
def _held_lease_term(store: ObjectStore, role: str) -> Generator[int]:
    lease = acquire_lease(store, LeaseCandidate(role, "fork", secrets.token_hex(16)), wait_s=0.0)
    yield lease.term
    lease.release()


def _write_trainer_state(
    bus: Bus, store: ObjectStore, wanted: ForkPlan, checkpoint: Checkpoint, term: int
) -> str:
    """What a trainer leaves that has just done this step; returns the hash of its state."""
    c, step = wanted.now, checkpoint.id.step
    disable_progress_bar()  # of transformers: it would stand between our lines
    set_torch_threads(c.trainer.threads)
    start = model_folder(c, wanted.folder.path)
    learner = open_learner(starting_model(c, wanted.folder.path), c.trainer)
    learner.load_state(checkpoint.tensors)
    writer = FencedWriter(bus, "weights", "trainer", term)
    files = config_and_tokenizer_files(start)
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
        configuration_hash=fingerprint(c),
    )
    write_checkpoint(store, step, term, learner.state(), state.encode())
    ledger = Ledger(bus, term)
    ledger.open(Position())
    origin = f"{wanted.before.run} {checkpoint.id}"
    run_id = read_or_create_identity(store, c.run).id
    record_configuration(store, c)
    ledger.append(
        [Configured(fingerprint(c), code_revision(), step, forked_from=origin, run_id=run_id)]
    )
    state_hash = learner.state_hash()
    learner.close()
    return state_hash


def _write_dispatch_state(store: ObjectStore, c: Configuration, step: int, left: PromptsLeft) -> None:
    """Under term 0: the first dispatch of the fork takes it over."""
    trained = step * c.trainer.groups_per_step
    begin = {"ledger": {"0": Position()}}
    kept = PersistedState(0, begin, admitted=trained, trained=trained, next_group=left.first())
    store.create(DISPATCH_KEY, encode_json(kept))


def _append_prompts(bus: Bus, order: PromptOrder, left: PromptsLeft, term: int) -> None:
    writer = FencedWriter(bus, "prompts", "prompts", term)
    writer.open()
    prompts = [order.at(group) for group in (*left.again, left.on)]
    writer.append([(str(prompt.group), prompt) for prompt in prompts])
