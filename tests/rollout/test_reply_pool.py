"""An `async def reply` answers thousands of dialogues in one process, each with one outcome."""

import time
from collections.abc import Iterator

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.rewards.pool import RewardOutcome, RewardPool, RewardVerdict
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.base import Reply
from testbed.waiting import wait_for

FAULTS = "tests.support.slow_dialogues:Faults"


@pytest.fixture
def pool() -> Iterator[RewardPool]:
    settings = TaskSettings(name=FAULTS, reply_timeout_s=2.0)
    one = RewardPool(settings, is_asynchronous=True)
    yield one
    one.close()


def collect(pool: RewardPool, count: int) -> dict[str, RewardOutcome]:
    """`count` outcomes; asserts that none comes twice."""
    found: dict[str, RewardOutcome] = {}

    def are_there() -> bool:
        for key, outcome in pool.poll():
            assert key not in found
            found[key] = outcome
        return len(found) >= count

    wait_for(are_there)
    return found


def test_a_thousand_dialogues_wait_in_one_process(pool: RewardPool) -> None:
    pool.submit_turn("first", "0", "", [[1]])
    collect(pool, 1)  # the process is ready
    began = time.monotonic()
    for number in range(1000):
        pool.submit_turn(f"{number}", "1.0", f"{number}", [[1]])
    found = collect(pool, 1000)
    assert found == {f"{n}": Reply((5,), f"{n}x") for n in range(1000)}
    assert time.monotonic() - began < 500  # one after another they take 1000 s


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("raise", "ZeroDivisionError at slow_dialogues.py"),
        ("hang", "took longer than 2 s"),
        ("time out", "TimeoutError at slow_dialogues.py"),
        ("cancel", "cancelled by the task's own code"),
        ("nothing", "reply() returned a NoneType"),
    ],
)
def test_a_failure_ends_one_reply_and_no_other(
    pool: RewardPool, reference: str, reason: str
) -> None:
    pool.submit_turn("bad", reference, "", [[1]])
    pool.submit_turn("good", "0.1", "", [[1]])
    found = collect(pool, 2)
    assert found["good"] == Reply((5,), "x")
    bad = found["bad"]
    assert isinstance(bad, RewardVerdict)
    assert reason in bad.reason


def test_a_reply_that_ends_its_process_fails_at_last(pool: RewardPool) -> None:
    pool.submit_turn("bad", "die", "", [[1]])
    bad = collect(pool, 1)["bad"]
    assert isinstance(bad, RewardVerdict)
    assert bad.reason == "its process ended (exit code 3)"
    pool.submit_turn("good", "0", "", [[1]])
    assert collect(pool, 1)["good"] == Reply((5,), "x")


def test_a_cancelled_reply_has_no_outcome(pool: RewardPool) -> None:
    pool.submit_turn("released", "0.5", "", [[1]])
    pool.submit_turn("kept", "0", "", [[1]])
    collect(pool, 1)
    pool.cancel("released")
    pool.cancel("unknown")
    pool.submit_turn("later", "1.0", "", [[1]])
    assert set(collect(pool, 1)) == {"later"}


def test_a_blocked_process_is_replaced(monkeypatch: pytest.MonkeyPatch, pool: RewardPool) -> None:
    monkeypatch.setattr("rollstream.producers.rewards.replies.GRACE_S", 0.5)
    pool.submit_turn("bad", "block", "", [[1]])
    bad = collect(pool, 1)["bad"]
    assert isinstance(bad, RewardVerdict)
    assert "its process did not end it" in bad.reason
    pool.submit_turn("good", "0", "", [[1]])
    assert collect(pool, 1)["good"] == Reply((5,), "x")


def test_a_task_that_cannot_be_built_is_an_error_of_the_configuration() -> None:
    settings = TaskSettings(name="scripted", options={"turns": 99})
    pool = RewardPool(settings, is_asynchronous=True)
    pool.submit_turn("one", "", "", [[1]])
    with pytest.raises(ConfigurationError, match="turns = 99"):
        wait_for(lambda: pool.poll() or None)
    pool.close()
