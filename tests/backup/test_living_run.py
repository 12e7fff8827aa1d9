"""Backups of a run that trains, truncates and archives meanwhile: every cut is clean, and the
restored run trains on.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rollstream.consumers.archive.service import ArchiveService
from rollstream.consumers.settings import ArchiveSettings
from rollstream.errors import PositionLost
from rollstream.keep.backup import Backup
from rollstream.run.cli.main import main
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.storage.identity import read_or_create_identity
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.streams.records import StepDone, Take
from testbed.memory import MemoryStore
from testbed.waiting import wait_for
from tests.backup.copies import backed_up, restored
from tests.support.kept_run import TASK, TOPICS, configuration_of
from tests.support.tiny_run import DISPATCH, TinyRun, tiny_run

Kept = TypeVar("Kept", StepDone, Take)
CUTS = 3
CHANGED = {
    "trainer": {"steps": 1000}, "checkpoint_every": 2, "task": TASK, "truncate": True,
    "dispatch": DISPATCH.model_copy(update={"keep_s": 0.05}), "archived": TOPICS,
}  # fmt: skip


@contextmanager
def trained(folder: Path, term: int) -> Generator[TinyRun]:
    """All roles of the run, under this term, until the end of the block."""
    with tiny_run(folder, **CHANGED) as run:
        run.start_prompts(term)
        run.start_dispatch(term)
        run.start_rollout("rollout-0")
        service = ArchiveService(run.bus, run.store, "tiny", ArchiveSettings(roll_s=0.1))
        run.start_thread(lambda: service.run(run.stop))
        trainer = threading.Thread(target=lambda: run.train(term, run.stop), daemon=True)
        trainer.start()
        yield run
        run.stop.set()
        trainer.join()
        assert not run.failures


def step_of(run: TinyRun) -> int:
    pointer = believed_pointer(run.store)
    return pointer.version.number if pointer and pointer.version else 0


def kept(run: TinyRun, cls: type[Kept]) -> list[Kept]:
    """The records of the ledger; read again if the living run truncated it meanwhile."""
    while True:
        try:
            return run.records("ledger", cls)
        except PositionLost:
            continue


def hashes(run: TinyRun) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for done in kept(run, StepDone):
        found.setdefault(done.step, set()).add(done.state_hash)
    return found


def test_every_cut_of_a_living_run_is_clean_and_trains_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    made: list[tuple[Backup, MemoryStore]] = []
    with trained(folder, 1) as run:
        write_configuration(RunFolder(folder), configuration_of(run))
        read_or_create_identity(run.store, "tiny")
        for number in range(CUTS):
            wait_for(lambda due=5 * number + 3: step_of(run) >= due)
            to = MemoryStore()
            made.append((backed_up(folder, to), to))
    for number, (backup, to) in enumerate(made):
        again = tmp_path / f"again-{number}"
        restored(to, again)
        assert main(["audit", str(again)]) != 1, number
        with trained(again, 2) as run:
            before = hashes(run)
            wait_for(lambda run=run, due=backup.step + 3: step_of(run) >= due)
            found = hashes(run)
            assert all(len(one) == 1 for one in found.values()), "a repeated step differs"
            assert all(found[step] == one for step, one in before.items() if step in found)
            used = [m.trajectory for take in kept(run, Take) for m in take.members]
            assert len(set(used)) == len(used)
        assert main(["audit", str(again)]) != 1, number
    assert any(any(one.begins) for backup, _ in made for one in backup.topics)
