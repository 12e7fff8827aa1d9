"""Roles and report of a run without a supervisor end with the run: processes over a finished run
whose trainer holds its lease once more, then releases it.
"""

import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from rollstream.errors import StoreError
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import store_url
from rollstream.run.roles.completion import is_complete, stop_when_complete
from rollstream.storage.leases import Lease, LeaseCandidate, acquire_lease
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.json_objects import encode_json
from rollstream.storage.weights.pointer import POINTER_KEY, Pointer
from rollstream.streams.values import Version
from testbed.memory import MemoryStore
from testbed.run_driver import HERE, RunDriver
from testbed.run_process import started
from testbed.servers import free_ports
from testbed.waiting import WAIT_S

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A finished run; its tests are slow."""
    folder = tmp_path_factory.mktemp("complete") / "run"
    with started(folder, model, [f"trainer.steps={STEPS}"]) as run:
        run.wait_complete()
    return folder


def store_of(folder: Path) -> ObjectStore:
    return open_store(store_url(load(folder / "config.json"), folder))


def take_lease(store: ObjectStore) -> Lease:
    """A trainer that has just published its last version."""
    return acquire_lease(store, LeaseCandidate("trainer", "trainer", "nonce", duration_s=0.1), 60.0)


def test_a_run_is_complete_once_its_last_step_is_believed_and_its_trainer_gone() -> None:
    store = MemoryStore()
    assert not is_complete(store, STEPS)
    lease = take_lease(store)
    pointer = Pointer("run", lease.term, Version(STEPS, 1), "manifest", "hash", None)
    store.create(POINTER_KEY, encode_json(pointer))
    assert not is_complete(store, STEPS)
    lease.release()
    assert is_complete(store, STEPS)
    assert not is_complete(store, STEPS + 1)


def asked(*answers: bool | StoreError) -> Callable[[], bool]:
    left = list(answers)

    def ask() -> bool:
        answer = left.pop(0)
        if isinstance(answer, StoreError):
            raise answer
        return answer

    return ask


@pytest.mark.parametrize("stops_last", [False, True])
def test_a_role_is_stopped_when_the_run_is_complete(stops_last: bool) -> None:
    stop, ask = threading.Event(), asked(False, StoreError("away"), True)
    with stop_when_complete(ask, stop, stops_last, pause_s=0.001, last_s=0.001) as complete:
        assert stop.wait(WAIT_S)
        assert complete.is_set()


def test_a_role_that_ends_by_itself_leaves_the_others_alone() -> None:
    stop = threading.Event()
    with stop_when_complete(asked(), stop, False, pause_s=WAIT_S) as complete:
        pass
    assert not stop.is_set()
    assert not complete.is_set()


@pytest.mark.slow
def test_a_role_exits_with_0_once_the_run_is_complete(folder: Path) -> None:
    lease = take_lease(store_of(folder))
    with RunDriver(folder) as run:
        dispatch = run.start("dispatch", "--until-complete")
        with pytest.raises(subprocess.TimeoutExpired):
            dispatch.wait(bound_s=8.0)  # two looks
        lease.release()
        dispatch.wait()


@pytest.mark.slow
def test_a_role_without_the_option_waits_for_its_signal(folder: Path) -> None:
    take_lease(store_of(folder)).release()
    with RunDriver(folder) as run:
        dispatch = run.start("dispatch")
        with pytest.raises(subprocess.TimeoutExpired):
            dispatch.wait(bound_s=8.0)
        assert dispatch.stop() == 143


@pytest.mark.slow
def test_a_complete_run_is_not_started_again_unless_more_is_asked_for(
    tmp_path: Path, model: Path
) -> None:
    folder = tmp_path / "run"
    with started(folder, model, [f"trainer.steps={STEPS}"]) as run:
        run.wait_complete()
    events = folder / "metrics" / "supervisor.jsonl"
    before = events.read_text()

    def printed(*words: str) -> str:
        done = HERE.run("run", str(folder), *words)
        return done.stdout + done.stderr

    text = printed()
    assert f"is complete: {STEPS} of {STEPS} steps; nothing was started" in text
    assert events.read_text() == before
    text = printed("--set", f"trainer.steps={STEPS + 1}", "--accept-config")
    assert f"{STEPS + 1} of {STEPS + 1}" in text
    assert "restarts\t0" in text


@pytest.mark.slow
def test_the_report_is_served_when_the_run_is_complete(folder: Path) -> None:
    lease, (port,) = take_lease(store_of(folder)), free_ports(1)

    def fetched() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    with RunDriver(folder, vital=("report",)) as run:
        report = run.start("report", "--when-complete", "--serve", f"127.0.0.1:{port}")
        run.wait_for(lambda: fetched()[1].startswith(f"step {STEPS} of {STEPS};"))
        lease.release()
        run.wait_for(lambda: "<html" in fetched()[1])
        assert (folder / "report.html").read_text() == fetched()[1]
        assert report.stop() == 0
