"""`rollstream run` with `trainer.processes = 2`: the stack starts the ranks, and restarts all of
them when any is killed; the log adds up.
"""

import json
import signal
from pathlib import Path

import psutil
import pytest

from rollstream.run.metrics.endpoint import endpoint_file
from rollstream.storage.metrics_file import read_metrics
from rollstream.streams.records import StepDone
from testbed.kills.final_counts import counted
from testbed.run_driver import RunDriver
from testbed.run_process import STEPS, assert_the_log_adds_up, read, started
from testbed.scraping import endpoint, get, scrape, value
from testbed.waiting import WAIT_S

MORE = [
    "trainer.processes=2", "trainer.ranks_timeout_s=60", "trainer.lease_s=2",
    "task.name=tests.support.uneven_task:Uneven",  # every step has a gradient
]  # fmt: skip


def ranks_of(run: RunDriver) -> dict[int, psutil.Process]:
    """The living ranks of the run's trainer."""
    try:
        trainer = run.living("trainer")
        children = [] if trainer is None else trainer.children()
        return {int(child.environ()["RANK"]): child for child in children}
    except (KeyError, psutil.Error):  # it is just starting, or ending
        return {}


def deaths(folder: Path) -> list[object]:
    lines = read_metrics(folder / "metrics" / "supervisor.jsonl")
    return [one["code"] for one in lines if one["event"] == "death" and one["role"] == "trainer"]


def assert_clean(folder: Path) -> None:
    assert_the_log_adds_up(folder)
    found = counted(folder, STEPS)
    assert found.is_clean, found.wrong


def has_pushed(folder: Path, name: str) -> bool:
    """Whether a relay was sent bytes by this rank."""
    if not endpoint_file(folder, name).exists():
        return False
    series, pushed = scrape(endpoint(folder, name)["url"]), "rollstream_trainer_pushed_bytes_total"
    return pushed in series and value(series, pushed) > 0


def state_of(folder: Path, name: str) -> str:
    return json.loads(get(f"{endpoint(folder, name)['url']}/healthz")[1])["state"]


@pytest.mark.long
def test_a_run_starts_its_ranks_itself_and_ends_clean(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "run"
    with started(folder, model, [*MORE, "relay.enabled=true"]) as run:
        run.wait_for(lambda: len(ranks_of(run)) == 2)
        children = list(ranks_of(run).values())
        run.wait_for(lambda: has_pushed(folder, "trainer-rank1"))
        run.wait_for(lambda: state_of(folder, "trainer-rank1") == "running")
        run.wait_complete()
    assert not [one for one in children if one.is_running()]
    assert "rank 1 of 2 on cpu" in (folder / "logs" / "trainer.log").read_text()
    assert not deaths(folder)
    assert_clean(folder)


@pytest.mark.slow
def test_a_killed_rank_or_launcher_starts_all_again_and_nothing_is_lost(
    tmp_path: Path, model: Path
) -> None:
    """Promise 1: rank 1 with `kill -9`, then rank 0, the process that started both, and the run."""
    folder, log = tmp_path / "run", tmp_path / "run" / "logs" / "trainer.log"
    with started(folder, model, MORE) as run:
        for steps, victim in ((2, 1), (4, 0), (6, None)):
            run.wait_for(lambda: run.step() >= steps and len(ranks_of(run)) == 2)  # noqa: B023
            launcher, ranks = run.role("trainer"), ranks_of(run)
            (launcher if victim is None else ranks[victim]).kill()
            _, alive = psutil.wait_procs([launcher, *ranks.values()], timeout=WAIT_S)
            assert not alive, "a rank outlived its group"
            run.role("trainer")
        run.wait_for(lambda: run.step() >= 8 and len(ranks_of(run)) == 2)
        run.newest().kill()  # and no rank outlives it
        run.start()
        run.wait_complete()
    assert deaths(folder) == [137, 137, -9]
    assert "RankLost" not in "".join(log.read_text().splitlines()[-5:])
    assert "rank 1 of the trainer is gone" in log.read_text()
    assert_clean(folder)
    assert len({one.state_hash for one in read(folder, "ledger", StepDone)}) == STEPS


@pytest.mark.long
def test_an_interrupted_run_stops_its_ranks_in_order_and_resumes(
    tmp_path: Path, model: Path
) -> None:
    folder = tmp_path / "run"
    with started(folder, model, MORE) as run:
        run.wait_for_step(3)
        children = [run.role("trainer"), *ranks_of(run).values()]
        assert run.newest().stop(signal.SIGINT) == 130
    assert not [one for one in children if one.is_running()]
    output = (folder / "logs" / "trainer.log").read_text()
    assert "trainer was stopped" in output
    assert "RankLost" not in output
    assert run.step() < STEPS, "it was complete before it was interrupted"
    with started(folder, model, MORE) as run:
        run.wait_complete()
    assert_clean(folder)


@pytest.mark.slow
def test_a_refusal_of_the_ranks_ends_the_run_with_their_message(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = tmp_path / "run"
    with started(folder, model, [*MORE, "trainer.device=cuda"]) as run:
        run.newest().wait(code=1)
        output = run.newest().text
    assert "rollstream: trainer refused to start: trainer.device must be a device of this" in output
    assert deaths(folder) == [2]
