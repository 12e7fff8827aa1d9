"""An earlier program of this repository and the present one over one run: they agree, or the
earlier one refuses and names the reason (invariant 14; docs/how-to/upgrade.md).
"""

import json
import tempfile
from pathlib import Path

import pytest

from rollstream.revision import code_revision
from rollstream.storage.identity import read_identity
from rollstream.storage.stores.connect import open_store
from rollstream.streams.records import Configured
from testbed.kills.final_counts import counted
from testbed.run_driver import Machine
from testbed.run_process import GROUPS, random_model, read
from testbed.two_programs import NAMES, NEW, MixedRun, earlier_program, mixed_run, state_of

pytestmark = pytest.mark.long

STEPS = 200  # so many that no process ends before everything was replaced
SETTINGS = [
    "trainer.lr=1e-6", "relay.enabled=true", "relay.status_s=0.3", "task.reward=late",
    "scoring.count=1", "archive.roll_s=1", "trainer.loss=truncated_is",
]  # fmt: skip
"""The loss is one that the earlier program knows; it does not know the default."""


@pytest.fixture
def old(tmp_path: Path) -> Machine:
    return earlier_program(tmp_path / "old")


def audited(program: Machine, run: MixedRun) -> str:
    return program.run("audit", str(run.folder)).stdout


def replayed(program: Machine, run: MixedRun, steps: int) -> None:
    """The program computes every step again from the log, to the bits that the ledger has."""
    words = ("--from-step", "0", "--to-step", str(steps), "--json")
    out = tempfile.mkdtemp(dir=run.folder.parent)
    done = program.run("replay", str(run.folder), *words, "--out", f"{out}/again")
    found = json.loads(done.stdout)
    assert (found["compared"], found["differing"]) == (steps, [])


def configuration_of(run: MixedRun) -> str:
    """The hash of the configuration that the run has recorded."""
    identity = read_identity(open_store(f"file:{run.folder / 'store'}"))
    assert identity is not None
    return identity.configuration


def test_every_role_is_upgraded_and_goes_back_while_the_run_trains(
    tmp_path: Path, old: Machine
) -> None:
    """Nothing new is used: both programs train the run, and both replay each step of the other."""
    with mixed_run(
        tmp_path / "run",
        random_model(tmp_path / "model"),
        [*SETTINGS, f"trainer.steps={STEPS}"],
    ) as run:
        run.start_all(old)
        run.wait_for_step(2)
        for program, order in ((NEW, NAMES), (old, NAMES[::-1])):
            for name in order:
                run.replace(program, name)
        run.wait_complete()
    revisions = [one.code_revision for one in read(run.folder, "ledger", Configured)]
    assert [one == code_revision() for one in revisions] == [False, True, False]
    for program in (old, NEW):
        audited(program, run)
        replayed(program, run, STEPS)
    found = counted(run.folder, STEPS)
    assert found.is_clean, found.wrong
    assert found.trained == STEPS * GROUPS


def test_once_a_new_feature_is_used_the_earlier_program_refuses_by_its_name(
    tmp_path: Path, old: Machine
) -> None:
    """A rollout of the earlier program that is left behind ends by itself. No role that is started
    in its release moves anything, and the later one finishes the run.
    """
    with mixed_run(
        tmp_path / "run", random_model(tmp_path / "model"), [*SETTINGS, "trainer.steps=100000"]
    ) as run:
        run.start_all(NEW)
        run.stop("rollout-1")
        left = run.start("rollout-1", host=old)
        run.wait_for_step(4)
        run.settings = [*run.settings, "task.redundancy=1"]
        run.processes.remove(left)  # it ends
        for name in [name for name in NAMES if name != "rollout-1"]:
            run.stop(name)
        run.start("trainer", "--accept-config", host=NEW)
        run.processes.append(left)
        assert "redundancy" in run.wait_refused("rollout-1")
        for name in [name for name in NAMES if name not in ("rollout-1", "trainer")]:
            run.start(name, host=NEW)
        run.wait_for_step(run.step() + 3)
        for process in [*run.processes]:
            run.stop(process.name)
        before, last = state_of(run.folder), run.step()
        run.settings = run.settings[:-1]  # the earlier program has no such setting
        for name in NAMES:
            run.start(name, host=old)
            text = run.wait_refused(name)  # of `config.json`, since all share the run's folder
            assert "task.redundancy" in text, text
        assert state_of(run.folder) == before
        run.settings = [*run.settings, "task.redundancy=1", f"trainer.steps={last + 5}"]
        recorded = configuration_of(run)
        run.start("trainer", "--accept-config", host=NEW)
        run.wait_for(lambda: configuration_of(run) != recorded)  # then the others agree with it
        for name in NAMES[:-1]:
            run.start(name, host=NEW)
        run.wait_complete()
    audited(NEW, run)
    found = counted(run.folder, last + 5)
    assert found.is_clean, found.wrong
