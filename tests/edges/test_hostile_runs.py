"""Looking commands on runs, archives and backups that a stranger made: they change, create and
delete nothing but what the user asked for, import and call nothing that a run names, send no secret
to a host that a run names, and end without a traceback.
"""

from collections.abc import Generator
from pathlib import Path

import pytest

from testbed.hostile_runs.calls import CALLS, NOT_LOOKING, unstated
from testbed.hostile_runs.cases import BY_NAME, CASES
from testbed.hostile_runs.matrix import Matrix
from testbed.hostile_runs.scene import snapshot
from testbed.hostile_runs.selection import CORE, rotating
from testbed.hostile_runs.trial import Attempt

SHOWN = (
    ("audit {run}", "link ~writing to the project, relative"),
    ("tail {run} trajectories --last 3", "link store/~writing to the project"),
    ("inspect {run} --last --logprobs --skip-corrupt", "model manifest writes keys through a link"),
    ("audit {run} --whole --json", "trainer.advantage names sent_module"),
    ("audit {run}", "trainer.advantage names installed_module"),
    ("tail {run} ledger --from begin --json", "Kafka, password"),
    ("query {run} --tables", "Kafka, token of a sent function"),
    ("checkpoints list {run}", "S3 store at an endpoint"),
    ("backup {run} {out}/backup", "link model to the project"),
    ("report {run}", "hard link report.html"),
    ("diff {own} {run} --json", "healthy archive"),
    ("config {run}", "FIFO config.json"),
    ("top {run} --once", "JSON nested: configuration"),
    ("ls {runs}", "modules in the working directory"),
    ("restore {run} {out}/restored", "backup: link ~writing"),
)
"""What a looking command did before it was hardened, or a neighbour of it: call and case."""
QUICK = (
    "tail {run} trajectories --last 3",
    "tail {run} ledger --from begin --json",
    "query {run} --tables",
    "config {run}",
)
"""One of each kind of harm: deletes, sends secrets, calls functions, waits for ever."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Generator[Matrix]:
    """Commands as processes of their own."""
    with Matrix(tmp_path_factory.mktemp("real") / "m", is_warm=False) as matrix:
        yield matrix


def assert_harmless(attempt: Attempt, case: str) -> None:
    assert not attempt.faults, (attempt.call, case, attempt.faults, attempt.output[-2000:])


def test_each_command_is_called_on_hostile_runs_or_says_why_not():
    assert unstated() == ()
    assert not {call.command for call in CALLS} & NOT_LOOKING.keys()
    assert all(NOT_LOOKING.values())


def test_calls_have_names_of_their_own():
    assert len({call.name for call in CALLS}) == len(CALLS)


@pytest.mark.slow
def test_each_case_differs_from_the_healthy_one(real: Matrix):
    healthy = {kind: contents(real, f"healthy {kind}") for kind in ("run", "archive", "backup")}
    alike = [case.name for case in CASES if contents(real, case.name) == healthy[case.kind]]
    assert alike == [name for name in BY_NAME if name.startswith("healthy")]


def contents(matrix: Matrix, name: str) -> dict[str, tuple[object, ...]]:
    """What the received folder of a case holds, without times."""
    received = matrix.scene(BY_NAME[name]).received
    if received.is_symlink():
        return {"": (received.readlink(),)}
    return {key: (*state[:2], state[-1]) for key, state in snapshot(received).items()}


@pytest.mark.parametrize(
    ("line", "name"),
    [pytest.param(*shown, marks=() if shown[0] in QUICK else pytest.mark.slow) for shown in SHOWN],
)
def test_looking_does_no_harm(line: str, name: str, real: Matrix):
    (call,) = (call for call in CALLS if " ".join(call.words) == line)
    assert_harmless(real.attempt(real.scene(BY_NAME[name]), call), name)


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_each_kind_of_case_meets_calls_in_turn(half: int, tmp_path: Path):
    cases = [BY_NAME[name] for name in CORE][half::2]
    with Matrix(tmp_path / "m", is_warm=True) as matrix:
        for case, calls in rotating(cases, 1):
            for _, attempt in matrix.attempts([case], calls):
                assert_harmless(attempt, case.name)
