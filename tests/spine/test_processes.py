"""`rollstream run` as real processes: killed with -9, interrupted, started again; then the log is
counted.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tiny_run import SIZES

from producers.settings import TaskSettings
from producers.tasks.registry import load_task
from storage.archive.whole import whole_topic
from storage.connect import open_store
from storage.model import build_model
from streams.connect import open_bus
from streams.records import Admitted, GroupClosed, Record, StepDone, Take

STEPS = 12
WAIT_S = 150.0
SETTINGS = [
    "warmup.enabled=false", "evaluation.enabled=false", f"trainer.steps={STEPS}",
    "trainer.groups_per_step=4", "trainer.samples_per_group=4", "trainer.workers=1",
    "checkpoints.every=4", "rollouts.slots=8", "rollouts.context_max=128",
    "sampling.tokens_max=60", "dispatch.heartbeat_timeout_s=2", "dispatch.max_lag=2",
    "dispatch.keep_s=0.5", "archive.roll_s=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the task's vocabulary: nothing is to be learnt here."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = load_task(TaskSettings()).tokenizer()
    sizes = SIZES | {"vocab_size": tokenizer.size} | dict(tokenizer.special)
    build_model("Qwen3ForCausalLM", sizes, seed=0).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@contextmanager
def started(folder: Path, model: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The run in its own process; ended by its id whatever the test does."""
    configuration = folder.parent / "tiny.toml"
    configuration.write_text('run = "tiny"\n')
    line = [sys.executable, "-m", "rollstream", "run", str(configuration), "--run", str(folder)]
    for setting in [*SETTINGS, f"model.path={model}"]:
        line += ["--set", setting]
    output = (folder.parent / "output.txt").open("ab")
    process = subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        output.close()
        if process.poll() is None:
            process.kill()
        process.wait(30)


def read(folder: Path, topic: str, kind: type[Record]) -> list:
    """All records of the topic: what the log has forgotten meanwhile is in the archive."""
    if not (folder / "bus" / f"{topic}.db").exists():
        return []
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    try:
        store = open_store(f"file:{folder / 'store'}")
        return [r for r in whole_topic(bus, store, "tiny", topic) if isinstance(r, kind)]
    finally:
        bus.close()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < give_up, "it did not come true in time"
        time.sleep(0.1)


def role(process: subprocess.Popen[bytes], name: str) -> psutil.Process:
    """The living process of a role of this run."""
    for child in psutil.Process(process.pid).children():
        if name in child.cmdline():
            return child
    raise AssertionError(f"no process of {name}")


def assert_the_log_adds_up(folder: Path) -> None:
    """Invariants 1 and 2 over the whole log, whoever was killed."""
    takes = read(folder, "ledger", Take)
    used = Counter(member.trajectory for take in takes for member in take.members)
    assert max(used.values()) == 1, "a trajectory was trained twice"
    trained = Counter(group.group for take in takes for group in take.groups)
    assert max(trained.values()) == 1
    assert len(trained) == STEPS * 4
    closed = {record.group for record in read(folder, "ledger", GroupClosed)}
    admitted = [record.group for record in read(folder, "admissions", Admitted)]
    assert len(set(admitted)) == len(admitted)
    assert not closed & set(trained)
    assert set(trained) | closed <= set(admitted)
    hashes: dict[int, set[str]] = {}
    for done in read(folder, "ledger", StepDone):
        hashes.setdefault(done.step, set()).add(done.state_hash)
    assert set(hashes) == set(range(1, STEPS + 1))
    assert all(len(found) == 1 for found in hashes.values()), "a repeated step differs"


def test_every_role_killed_once_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path, model: Path
) -> None:
    """Promise 1 with `kill -9`, one role after the other while the run goes on."""
    folder = tmp_path / "run"
    with started(folder, model) as process:
        for steps, name in enumerate(("trainer", "rollout-0", "dispatch", "prompts"), start=2):
            wait_for(lambda: len(read(folder, "ledger", StepDone)) >= steps, process)  # noqa: B023
            victim = role(process, name)
            victim.send_signal(signal.SIGKILL)
            wait_for(lambda: role_restarted(process, name, victim.pid), process)  # noqa: B023
        assert process.wait(WAIT_S) == 0
    assert_the_log_adds_up(folder)
    assert (folder / "report.html").stat().st_size > 10_000


def role_restarted(process: subprocess.Popen[bytes], name: str, before: int) -> bool:
    try:
        return role(process, name).pid != before
    except (AssertionError, psutil.NoSuchProcess):
        return False


def test_an_interrupted_run_goes_on_from_its_last_checkpoint(tmp_path: Path, model: Path) -> None:
    """Ctrl-C, then the same command again."""
    folder = tmp_path / "run"
    with started(folder, model) as process:
        wait_for(lambda: len(read(folder, "ledger", StepDone)) >= 5, process)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) != 0
    assert len(read(folder, "ledger", StepDone)) < STEPS
    with started(folder, model) as process:
        assert process.wait(WAIT_S) == 0
    assert "goes on after step 4" in (folder / "logs" / "trainer.log").read_text()
    assert_the_log_adds_up(folder)


def test_the_whole_run_killed_at_once_goes_on(tmp_path: Path, model: Path) -> None:
    """Supervisor and all roles die together, then the same command again."""
    folder = tmp_path / "run"
    with started(folder, model) as process:
        wait_for(lambda: len(read(folder, "ledger", StepDone)) >= 3, process)
        children = psutil.Process(process.pid).children()
        process.kill()
        process.wait(10)
        gone, alive = psutil.wait_procs(children, timeout=10)
        assert gone
        assert not alive, "a role outlived its supervisor"
    with started(folder, model) as process:
        assert process.wait(WAIT_S) == 0
    assert_the_log_adds_up(folder)
