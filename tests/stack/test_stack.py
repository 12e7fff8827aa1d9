"""docker-compose.yml on a real Docker daemon: a run is trained while the first process of every
container is killed, with more rollouts, over a `down` and an `up`, to its end and its report.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.stack.compose import ROLES, SERVERS, Stack, wait_until
from testbed.stack.daemon import StackDaemon
from testbed.stack.whole_run import StackRun, audit_outside

pytestmark = pytest.mark.long

UP_S = 1800.0  # warm-up included, beside other programs
STEPS = 60  # so many that the run is not complete before everything was tried
SETTINGS = {
    "TRAINER__STEPS": str(STEPS),
    "TRAINER__GROUPS_PER_STEP": "8",
    "CHECKPOINTS__EVERY": "5",
    "WARMUP__STEPS": "200",
    "WARMUP__DOCUMENTS": "5000",
    "EVALUATION__EVERY": "30",
    "EVALUATION__PROMPTS": "40",
}
"""The quickstart, shortened. That it learns is in tests/compose/test_compose_roles.py."""


@pytest.fixture
def stack(daemon: StackDaemon) -> Iterator[Stack]:
    made = Stack(daemon, SETTINGS)
    with made.without_data():
        yield made


def test_a_run_outlives_the_death_of_every_container_and_ends_with_its_report(
    stack: Stack, tmp_path: Path
) -> None:
    stack.up()
    run = StackRun(stack)
    wait_until(stack, (*ROLES, *SERVERS), "healthy", UP_S)
    run.wait_for_step(2)
    for service in sorted((*ROLES, *SERVERS)):
        run.kill(service)
    wait_until(stack, (*ROLES, *SERVERS), "healthy", UP_S)
    stack.up("--scale", "rollout=4", "--no-recreate")
    assert len(wait_until(stack, ["rollout"], "healthy", UP_S)) == 4
    before = run.step()
    assert before < STEPS, "the run was complete before everything was tried"
    stack.down()
    assert stack.containers() == []
    stack.up()
    run.wait_for_step(before)
    wait_until(stack, ROLES, "ended", UP_S)
    (trainer,) = stack.containers("trainer")
    assert "resumes after step" in stack.logs(trainer, 10_000)
    run.wait_for_report()
    run.audit()
    audit_outside(stack, tmp_path)
