"""Every behaviour of a reward ends as one verdict, and the pool continues (invariant 1)."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.rewards.pool import RewardOutcome, RewardPool, RewardVerdict
from rollstream.producers.rewards.process import alarm_s
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.base import Reply
from rollstream.program_output import EPISODE_BYTES
from testbed.waiting import WAIT_S, wait_for
from tests.tasks.odd_replies import REPLIES


def settings(
    name: str = "tests.tasks.odd_tasks:Odd", limit_s: float = 30.0, processes: int = 1
) -> TaskSettings:
    return TaskSettings(name=name, reward_timeout_s=limit_s, reward_processes=processes)


@pytest.fixture
def pool() -> Iterator[RewardPool]:
    one = RewardPool(settings())
    yield one
    one.close()


def collect(pool: RewardPool, count: int) -> dict[str, RewardOutcome]:
    """`count` outcomes; asserts that none comes twice."""
    outcomes: dict[str, RewardOutcome] = {}

    def are_there() -> bool:
        for key, outcome in pool.poll():
            assert key not in outcomes
            outcomes[key] = outcome
        return len(outcomes) >= count

    wait_for(are_there)
    return outcomes


def verdict(pool: RewardPool, reference: str) -> RewardVerdict:
    pool.submit("one", reference, [[5, 2]])
    outcome = collect(pool, 1)["one"]
    assert isinstance(outcome, RewardVerdict)
    return outcome


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("raise", "ZeroDivisionError at odd_tasks.py"),
        ("nan", "the reward is nan"),
        ("infinite", "the reward is inf"),
        ("none", "the reward is a NoneType, not a number"),
        ("text", "the reward is a str, not a number"),
        ("nothing", "judge() returned a NoneType, not a Score"),
        ("exit", "its process ended (exit code 7)"),
    ],
)
def test_a_failing_reward_is_a_dead_verdict_and_the_next_is_fine(
    pool: RewardPool, reference: str, reason: str
):
    failed = verdict(pool, reference)
    assert failed.dead
    assert reason in failed.reason
    assert verdict(pool, "fine") == RewardVerdict(1.0, {"length": 2.0})


@pytest.mark.parametrize("reference", ["hang", "hang with the interpreter's lock"])
def test_a_hanging_reward_is_killed_and_only_it_is_lost(reference: str):
    now_s = [0.0]
    pool = RewardPool(settings(limit_s=9.0), clock=lambda: now_s[0])
    for number in range(20):
        pool.submit(str(number), reference if number == 5 else "fine", [[5]])
    before = collect(pool, 5)
    now_s[0] = 9.5
    after = collect(pool, 15)
    pool.close()
    assert sorted(before) == ["0", "1", "2", "3", "4"]
    assert after.pop("5") == RewardVerdict(reason="took longer than 9 s")
    assert {one.reward for one in after.values() if isinstance(one, RewardVerdict)} == {1.0}


def test_calls_that_wait_behind_a_death_are_repeated_on_the_replacement():
    pool = RewardPool(settings(processes=2))
    for number in range(300):
        pool.submit(str(number), "exit" if number in (0, 150) else "fine", [[5]])
    outcomes = collect(pool, 300)
    pool.close()
    assert {
        key for key, one in outcomes.items() if isinstance(one, RewardVerdict) and one.dead
    } == {
        "0",
        "150",
    }


def test_the_code_of_a_task_sees_no_credential_of_the_run(monkeypatch: pytest.MonkeyPatch):
    """With them a sampled program could write the ledger or a role's lease."""
    hidden = {"KAFKA_PASSWORD", "KAFKA_KEY_PASSWORD", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}
    hidden |= {"ROLLSTREAM_RELAY_TOKEN", "AZURE_KEY", "OPENAI_API_KEY"}
    for name in {*hidden, "JUDGE_KEY", "OMP_NUM_THREADS", "HF_HOME"}:
        monkeypatch.setenv(name, "1")
    named = TaskSettings(
        name="tests.tasks.odd_tasks:Odd",
        environment=("JUDGE_KEY", "KAFKA_PASSWORD"),
        reward_timeout_s=30.0,
    )
    pool = RewardPool(named)
    seen = {name.partition("=")[0] for name in verdict(pool, "environment").scores}
    pool.close()
    assert not hidden & seen
    assert {"JUDGE_KEY", "OMP_NUM_THREADS", "HF_HOME", "PATH", "PYTHONPATH"} <= seen


def test_a_task_beside_the_working_directory_imports_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_neighbour.py").write_text("REWARD = 0.75\n")
    (tmp_path / "my_task.py").write_text(
        "from rollstream.producers.tasks.base import Score\n"
        "from rollstream.producers.tasks.remainder import Remainder\n"
        "class Mine(Remainder):\n"
        "    def judge(self, reference, turns):\n"
        "        from my_neighbour import REWARD\n"
        "        return Score(REWARD)\n"
    )
    monkeypatch.chdir(tmp_path)
    pool = RewardPool(settings("my_task:Mine"))
    assert verdict(pool, "any").reward == 0.75
    pool.close()


def test_what_a_reward_prints_does_not_disturb_the_answers(pool: RewardPool):
    assert verdict(pool, "print").reward == 1.0


def test_what_a_reward_prints_is_printable_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "loud_task.py").write_text(
        "import sys\n"
        "from rollstream.producers.tasks.remainder import Remainder\n"
        "class Mine(Remainder):\n"
        "    def judge(self, reference, turns):\n"
        "        sys.stdout.write('\\x1b]0;owned\\x07first\\n' + 100_000 * 'noise\\n')\n"
        "        sys.stdout.flush()\n"
        "        return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    pool = RewardPool(settings("loud_task:Mine"))
    assert verdict(pool, "any").reward == 1.0
    pool.close()
    printed = capfd.readouterr().err
    assert "first" in printed
    assert "\x1b" not in printed
    assert "bytes of a program's output left out" in printed
    assert len(printed) < 2 * EPISODE_BYTES


def test_answers_longer_than_a_pipe_arrive(pool: RewardPool):
    for number in range(5):
        pool.submit(str(number), "fine", [list(range(100_000))])
    outcomes = collect(pool, 5)
    assert {
        one.scores["length"] for one in outcomes.values() if isinstance(one, RewardVerdict)
    } == {100_000.0}


def test_the_queue_is_bounded_and_empties():
    pool = RewardPool(settings(), capacity=2)
    pool.submit("a", "fine", [[5]])
    pool.submit("b", "fine", [[5]])
    assert not pool.can_submit()
    with pytest.raises(AssertionError, match="can_submit"):
        pool.submit("c", "fine", [[5]])
    collect(pool, 2)
    assert pool.can_submit()
    pool.close()


def test_an_environment_replies_through_the_pool():
    pool = RewardPool(settings("scripted"))
    pool.submit_turn("turn", '{"script": [7, 5, 9]}', "", [[11, 17]])
    pool.submit_turn("broken", '{"script": [7', "", [[11, 17]])
    outcomes = collect(pool, 2)
    pool.close()
    assert outcomes["turn"] == Reply((9, 15), "2")
    assert isinstance(outcomes["broken"], RewardVerdict)
    assert outcomes["broken"].dead


def test_a_reply_of_wrong_types_is_a_dead_verdict_and_the_process_lives():
    """Invalid tokens would end the rollout that puts them into a record."""
    pool = RewardPool(settings("tests.tasks.odd_replies:OddReplies"))
    for kind in REPLIES:
        pool.submit_turn(kind, kind, "", [[5]])
    outcomes = collect(pool, len(REPLIES))
    pool.close()
    assert outcomes.pop("fine") == Reply((5, 6), "on")
    reasons = {kind: outcome.reason for kind, outcome in outcomes.items()}  # pyright: ignore
    assert len(reasons) == len(REPLIES) - 1
    assert not [kind for kind, reason in reasons.items() if "its process ended" in reason]
    assert "the token -1, outside" in reasons["negative"]
    assert "the token 5.0, not a whole number" in reasons["float"]
    assert "a state that is a int, not text" in reasons["a number for a state"]
    assert "more than 65536 tokens" in reasons["endless"]


def test_a_reward_may_compute_on_all_cores_for_its_whole_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert alarm_s(10) > 10 * 64


def test_a_reward_of_numpy_is_a_number(pool: RewardPool):
    assert verdict(pool, "numpy").reward == 0.5


def test_a_task_that_cannot_be_built_is_a_configuration_error():
    unknown = RewardPool(settings("tests.tasks.odd_tasks:Nobody"))
    unknown.submit("a", "fine", [[5]])
    with pytest.raises(ConfigurationError, match="no callable 'Nobody'"):
        collect(unknown, 1)
    unready = RewardPool(settings("tests.tasks.odd_tasks:Unready"))
    unready.submit("a", "fine", [[5]])
    with pytest.raises(ConfigurationError, match="3 reward processes in a row"):
        collect(unready, 1)


def test_an_idle_pool_has_no_process():
    before = set(psutil.Process().children())
    pool = RewardPool(settings(processes=4))
    assert pool.poll() == []
    assert not set(psutil.Process().children()) - before


PARENT = """
import sys, time
from rollstream.producers.rewards.pool import RewardPool
from rollstream.producers.settings import TaskSettings
pool = RewardPool(TaskSettings(name="tests.tasks.odd_tasks:Odd", reward_timeout_s=600))
pool.submit("hanging", sys.argv[1], [[5]])
while True:
    pool.poll()
    time.sleep(0.01)
"""


def test_reward_processes_end_when_the_parent_is_killed(tmp_path: Path):
    note = tmp_path / "pid"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(note)], env=environment)
    try:
        wait_for(lambda: note.exists() and note.read_text(), parent)
        child = psutil.Process(int(note.read_text()))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    gone, _ = psutil.wait_procs([child], timeout=WAIT_S)
    assert gone == [child]
