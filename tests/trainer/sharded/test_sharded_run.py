"""A run whose trainer is `torchrun`: a killed rank ends the group, the next start resumes from the
checkpoint, and the log adds up; SIGTERM ends all ranks in order.
"""

from pathlib import Path

import psutil
import pytest

from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.adapters import BASE
from rollstream.storage.weights.checkpoints import stored_checkpoints
from rollstream.storage.weights.manifest import read_manifest
from rollstream.storage.weights.verify import verify_version
from rollstream.streams.records import GroupClosed, StepDone, Take
from rollstream.streams.values import Version
from testbed.kills.aims import Aim
from testbed.kills.final_counts import counted
from testbed.run_driver import RunDriver, RunProcess
from testbed.run_process import GROUPS, STEPS, assert_the_log_adds_up, by_hand, read
from testbed.waiting import WAIT_S

MORE = [
    "trainer.lease_s=2", "trainer.ranks_timeout_s=60", "dispatch.lease_s=2",
    "task.name=tests.support.uneven_task:Uneven",  # every step has a gradient
]  # fmt: skip
OTHERS = ("archive", "prompts", "dispatch", "rollout-0", "rollout-1")


def torchrun(run: RunDriver, size: int, *more: str) -> RunProcess:
    """The trainer as `size` processes of the run's module."""
    launcher = ("torch.distributed.run", "--standalone", *more, "--nproc-per-node", str(size), "-m")
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    return run.start("trainer", launcher=launcher, environment=environment)


def process_of_rank(trainer: RunProcess, rank: int) -> psutil.Process | None:
    """A rank's process, once it exists; the lowest of several process ids, since its own children
    have higher ones.
    """
    children = psutil.Process(trainer.pid).children()
    return next((child for child in children if _rank(child) == str(rank)), None)


def _rank(process: psutil.Process) -> str:
    try:
        return process.environ().get("RANK", "")
    except (psutil.Error, OSError):  # it just ended, or is not yet the program that it becomes
        return ""


def start_all(run: RunDriver) -> None:
    for name in OTHERS:
        run.start(name)


def assert_it_is_as_if_nothing_had_died(folder: Path) -> None:
    assert_the_log_adds_up(folder)
    found = counted(folder, STEPS)
    assert found.is_clean, found.wrong
    assert len({record.state_hash for record in read(folder, "ledger", StepDone)}) == STEPS


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_the_next_start_resumes(tmp_path, model):
    folder = tmp_path / "run"
    with by_hand(folder, model, MORE) as run:
        start_all(run)
        first = torchrun(run, 2)
        run.wait_for_step(5)
        second_rank = process_of_rank(first, 1)
        assert second_rank is not None
        workers = psutil.Process(first.pid).children()
        second_rank.kill()
        assert first.wait(None) != 0
        assert not [one for one in workers if one.is_running()], "a rank outlived the group"
        assert "rank 1 of the trainer is gone" in first.text, first.describe()
        torchrun(run, 2)
        run.wait_complete()
    assert_it_is_as_if_nothing_had_died(folder)


@pytest.mark.long
def test_a_restart_by_torchrun_itself_resumes(tmp_path, model):
    folder = tmp_path / "run"
    with by_hand(folder, model, MORE) as run:
        start_all(run)
        first = torchrun(run, 2, "--max-restarts", "2")
        run.wait_for_step(3)
        leading = process_of_rank(first, 0)
        assert leading is not None
        leading.kill()
        run.wait_complete()
    assert_it_is_as_if_nothing_had_died(folder)


@pytest.mark.long
def test_another_number_of_ranks_resumes_after_a_clean_stop(tmp_path, model):
    folder = tmp_path / "run"
    with by_hand(folder, model, MORE) as run:
        start_all(run)
        first = torchrun(run, 2)
        run.wait_for_step(5)
        workers = psutil.Process(first.pid).children()
        first.stop()
        assert not [one for one in workers if one.is_running()]
        assert "trainer was stopped" in first.text, first.describe()
        assert "RankLost" not in first.text
        run.start("trainer")  # one process
        run.wait_complete()
    done = {record.step for record in read(folder, "ledger", StepDone)}
    assert done == set(range(1, STEPS + 1))
    takes = read(folder, "ledger", Take)
    used = [member.trajectory for take in takes for member in take.members]
    assert len(used) == len(set(used)), "a trajectory was trained twice"
    groups = {group.group for take in takes for group in take.groups}
    assert len(groups) == STEPS * GROUPS
    assert not groups & {record.group for record in read(folder, "ledger", GroupClosed)}


@pytest.mark.long
def test_an_adapter_resumes_on_another_number_of_ranks_wherever_rank_0_dies(tmp_path, model):
    """Two ranks until all files of the base but its manifest are there; three, until there is a
    checkpoint of step 4 and no manifest of version 5; then one process.
    """
    folder, manifest = tmp_path / "run", "create weights/vN-tN/manifest.json"
    with by_hand(folder, model, [*MORE, "model.lora.rank=3"]) as run:
        start_all(run)
        # Each life of a rank 0 counts its own manifests, the base's first.
        for size, nth in ((2, 1), (3, 7)):
            run.aims.aim(Aim("trainer", manifest, nth=nth))
            trainer = torchrun(run, size)
            assert trainer.wait(None) != 0
            assert "SIGKILL" in trainer.text, trainer.describe()
        store = open_store(f"file:{folder / 'store'}")
        assert max(one.id.step for one in stored_checkpoints(store)) == 4
        assert run.step() == 4
        run.start("trainer")
        run.wait_complete()
    assert all(run.aims.fired())
    assert_it_is_as_if_nothing_had_died(folder)
    store = open_store(f"file:{folder / 'store'}")
    assert verify_version(store, BASE)[1] == ""
    last = Version(STEPS, 3)
    assert verify_version(store, last)[1] == ""
    assert read_manifest(store, last).kind == "adapter"


@pytest.mark.slow
def test_the_ranks_of_a_killed_torchrun_do_not_outlive_it(tmp_path, model):
    folder = tmp_path / "run"
    with by_hand(folder, model, MORE) as run:
        first = torchrun(run, 2)
        run.wait_for(lambda: process_of_rank(first, 1) and (folder / "logs").parent.exists())
        run.wait_for(lambda: "rank 1 of 2" in first.text)
        workers = psutil.Process(first.pid).children()
        first.kill()
        gone, alive = psutil.wait_procs(workers, timeout=WAIT_S)
        assert len(gone) >= 2
        assert not alive
