"""A small run of real processes for tests (`started`, `by_hand`), and the counts of its log
afterwards. They are the same over every bus and store, since the run's own configuration names
them. Import it as `testbed.run_process` everywhere.
"""

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rollstream.errors import TopicMissing
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.registry import load_task
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import (
    folder_of_run,
    open_run_log_for_writing,
    store_url,
    write_configuration,
)
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.starting_model.models import build_model
from rollstream.storage.stores.connect import open_store
from rollstream.streams.records import Admitted, GroupClosed, Record, StepDone, Take, Trajectory
from testbed.kills.aims import AimFolder
from testbed.run_driver import RunDriver

Kind = TypeVar("Kind", bound=Record)

STEPS = 12
GROUPS = 4
SETTINGS = [
    "warmup.enabled=false", "evaluation.enabled=false", f"trainer.steps={STEPS}",
    f"trainer.groups_per_step={GROUPS}", "trainer.samples_per_group=4", "trainer.workers=1",
    "checkpoints.every=4", "rollouts.slots=8", "rollouts.context_max=128",
    "sampling.tokens_max=60", "dispatch.heartbeat_timeout_s=2", "dispatch.max_lag=2",
    "dispatch.keep_s=0.5", "archive.roll_s=2",
]  # fmt: skip
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip


def random_model(folder: Path) -> Path:
    """A model with the task's vocabulary and random weights."""
    tokenizer = load_task(TaskSettings()).tokenizer()
    sizes = SIZES | {"vocab_size": tokenizer.size} | dict(tokenizer.special)
    build_model("Qwen3ForCausalLM", sizes, seed=0).save_pretrained(folder)  # pyright: ignore[reportUnknownMemberType]
    tokenizer.save(folder)
    return folder


def tiny(
    folder: Path, model: Path, more: Sequence[str] = (), aims: AimFolder | None = None
) -> RunDriver:
    """The small run with `more` in addition to its settings; `aims` are at its roles."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    configuration = folder.parent / "tiny.toml"
    configuration.write_text('run = "tiny"\n')
    settings = [*SETTINGS, f"model.path={model}", *more]
    module = "rollstream" if aims is None else "testbed.kills.aimed_role"
    return RunDriver(folder, configuration, settings, module=module, aim_folder=aims)


@contextmanager
def started(
    folder: Path, model: Path, more: Sequence[str] = (), aims: AimFolder | None = None
) -> Generator[RunDriver]:
    """The small run under its supervisor, which is started; see `tiny`."""
    with tiny(folder, model, more, aims) as run:
        run.start()
        yield run


@contextmanager
def by_hand(folder: Path, model: Path, more: Sequence[str] = ()) -> Generator[RunDriver]:
    """The small run without processes. A test starts its roles in any order: no supervisor passes
    leases on or restarts them, and a role may end.
    """
    aims = AimFolder(folder.parent / "aims")
    with tiny(folder, model, [f"folder={folder}", *more], aims) as run:
        assert run.configuration is not None
        loaded = load(run.configuration, run.settings, {})
        write_configuration(folder_of_run(loaded), loaded)
        run.configuration, run.settings, run.vital = None, (), ()
        yield run


def read(folder: Path, topic: str, kind: type[Kind]) -> list[Kind]:
    """All records of the topic; truncated ones are read from the archive."""
    if not (folder / "config.json").exists():
        return []
    configuration = load(folder / "config.json")
    bus = open_run_log_for_writing(configuration, folder)
    try:
        store = open_store(store_url(configuration, folder))
        whole = LogView(bus, store, configuration.run).topic(topic).records()
        return [one.record for one in whole if isinstance(one.record, kind)]
    except TopicMissing:  # the run has not come that far
        return []
    finally:
        bus.close()


def assert_the_log_adds_up(folder: Path, steps: int = STEPS) -> None:
    """Invariants 1 and 2 over the whole log, with any kills."""
    takes = read(folder, "ledger", Take)
    used = Counter(member.trajectory for take in takes for member in take.members)
    assert max(used.values()) == 1, "a trajectory was trained twice"
    trained = Counter(group.group for take in takes for group in take.groups)
    assert max(trained.values()) == 1
    assert len(trained) == steps * GROUPS
    closed = {record.group for record in read(folder, "ledger", GroupClosed)}
    admitted = [record.group for record in read(folder, "admissions", Admitted)]
    assert len(set(admitted)) == len(admitted)
    assert not closed & set(trained)
    assert set(trained) | closed <= set(admitted)
    finished = {record.trajectory for record in read(folder, "trajectories", Trajectory)}
    assert set(used) <= finished, "a trajectory that was trained is gone"
    hashes: dict[int, set[str]] = {}
    for done in read(folder, "ledger", StepDone):
        hashes.setdefault(done.step, set()).add(done.state_hash)
    assert set(hashes) == set(range(1, steps + 1))
    assert all(len(found) == 1 for found in hashes.values()), "a repeated step differs"
