"""Code of a task runs programs in sandboxes; a machine without them ends the run."""

import pytest

from rollstream.api import sandbox
from rollstream.errors import ConfigurationError
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.rewards.pool import RewardPool, RewardVerdict
from rollstream.producers.sandbox import factory
from rollstream.producers.sandbox.factory import SandboxPlan
from rollstream.producers.sandbox.grading import ProgramTest, passes_tests, program_of, read_tests
from rollstream.producers.settings import SandboxSettings, TaskSettings
from rollstream.producers.tasks.base import Option, Score
from testbed.servers import bubblewrap
from testbed.waiting import wait_for

PATIENT = sandbox.SandboxLimits(time_s=300.0)
SUMS = {"tests": [{"stdin": "1 2", "stdout": "3\n"}, {"stdin": "4 5", "stdout": "9"}]}
CALLS = [{"call": "add(1, 2)", "returns": 3}, {"call": "add([1], [2])", "returns": [1, 2]}]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    bubblewrap.program()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this machine does, a program has the time that it needs."""
    monkeypatch.setattr(factory, "configured_plan", lambda: SandboxPlan(limits=PATIENT))


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def test_a_program_that_passes_all_tests_gets_the_reward():
    right = fenced("print(sum(map(int, input().split())))")
    assert passes_tests(right, SUMS) == Score(1.0, {"passed": 1.0, "style/has_program": 1.0})
    assert passes_tests(fenced("print(3)"), SUMS).scores["passed"] == 0.5
    assert passes_tests(fenced("def add(a, b): return a + b"), CALLS).reward == 1.0
    assert passes_tests(fenced("def add(a, b): return 3"), CALLS).scores["passed"] == 0.5


def test_a_program_that_ends_its_process_or_prints_much_passes_nothing():
    for program in ("import os; os._exit(0)", "raise SystemExit", "1/0", "print('{' * 10**6)"):
        assert passes_tests(fenced(program), CALLS).reward == 0.0


def test_an_answer_without_a_program_that_can_run_gets_nothing():
    assert passes_tests("", SUMS).scores == {"passed": 0.0, "style/has_program": 0.0}
    assert passes_tests("```cobol\nSTOP RUN.\n```", SUMS).reward == 0.0


def test_the_last_block_is_the_program():
    assert program_of("```py\nA\n```\n```bash\nB\n```") == ("sh", "B\n")
    assert program_of("print(1)") == ("python", "print(1)")


@pytest.mark.parametrize(
    "reference", [None, [], [{}], [{"stdout": 3}], [{"call": "f", "stdout": ""}]]
)
def test_a_reference_without_tests_is_refused(reference: object):
    with pytest.raises(ValueError, match="test"):
        passes_tests("print(1)", reference)


def test_fields_that_are_null_count_as_absent():
    """Parquet writes every field of a struct."""
    rows = [
        {"stdin": "1", "stdout": "2", "call": None, "returns": None, "note": None},
        {"stdin": None, "stdout": None, "call": "f()", "returns": None},
    ]
    assert read_tests(rows) == [ProgramTest("1", "2"), ProgramTest(call="f()")]


def test_a_program_runs_by_its_text_or_its_words():
    assert sandbox.run("print(input())", stdin="hi", limits=PATIENT).text == "hi\n"
    assert sandbox.run("echo $((1 + 2))", language="sh", limits=PATIENT).text == "3\n"
    assert sandbox.run(["cat", "a"], files={"a": "x"}, limits=PATIENT).text == "x"
    with pytest.raises(ValueError, match="language 'pyhton'; did you mean 'python'"):
        sandbox.run("", language="pyhton")


def pool(backend: str) -> RewardPool:
    options: dict[str, Option] = {
        "path": "unused.jsonl",
        "verifier": "rollstream.producers.sandbox.grading:passes_tests",
    }
    limits = SandboxSettings(backend=backend, time_s=200.0)
    return RewardPool(
        TaskSettings(name="dataset", options=options, sandbox=limits, reward_timeout_s=500.0)
    )


def judged(one: RewardPool) -> RewardVerdict:
    answer = TextTokenizer(None).encode(fenced("print(sum(map(int, input().split())))"))
    one.submit("key", '[{"stdin": "1 2", "stdout": "3"}]', [answer])
    try:
        ((_, verdict),) = wait_for(one.poll)
    finally:
        one.close()
    assert isinstance(verdict, RewardVerdict)
    return verdict


def test_a_reward_process_runs_the_program_of_an_answer():
    assert judged(pool("bubblewrap")).reward == 1.0


def test_a_machine_without_the_sandbox_ends_the_run_and_runs_nothing():
    with pytest.raises(ConfigurationError, match="is not registered; did you mean 'bubblewrap'"):
        judged(pool("bubblewarp"))


def test_a_plug_in_is_named_by_its_import_path():
    assert judged(pool("testbed.escapes.unconfined:plug_in")).reward == 1.0
