"""A program in another language appends trajectories that are trained
(docs/reference/wire-format.md).
"""

import subprocess
from pathlib import Path

import pytest

from rollstream.consumers.settings import DispatchSettings
from rollstream.storage.terms import next_term
from rollstream.streams.records import Admitted, StepDone, Take, Trajectory
from rollstream.streams.values import Version
from rollstream.streams.writer import publish
from testbed.repository import EXAMPLES
from testbed.servers import kafka_broker
from testbed.waiting import WAIT_S, wait_for
from tests.dispatch.test_recovery import status
from tests.support.tiny_run import tiny_run

WRITER = EXAMPLES / "writers" / "WriteTrajectories.java"


def write(url: str, groups: int) -> None:
    server, prefix = url.removeprefix("kafka://").split("/")
    jars = f"{kafka_broker.jars()}/*"
    command = ["java", *kafka_broker.SHORT_LIVED, "-cp", jars, str(WRITER)]
    done = subprocess.run(
        [*command, server, prefix, str(groups)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_what_java_appends_is_trained(tmp_path: Path) -> None:
    url = kafka_broker.new_url()
    trainer = {"steps": 1, "groups_per_step": 2, "samples_per_group": 2}
    dispatch = DispatchSettings(heartbeat_timeout_s=WAIT_S)
    with tiny_run(tmp_path, bus=url, trainer=trainer, dispatch=dispatch) as run:
        run.start_prompts(1)
        run.start_dispatch(1)
        trained = run.start_trainer()
        term = next_term(run.store, "rollouts", "java")

        def is_admitted() -> bool:
            publish(run.bus, "status", f"java/{term}", status("java", term, Version(0, 1)))
            return len(run.records("admissions", Admitted)) == 2

        wait_for(is_admitted)
        write(url, groups=2)
        assert trained.wait(WAIT_S)
        written = run.records("trajectories", Trajectory)
        assert {record.rollout for record in written} == {"java"}
        trained_by = {
            member.trajectory
            for take in run.records("ledger", Take)
            for group in take.groups
            for member in group.members
        }
        assert trained_by == {record.trajectory for record in written}
        (step,) = run.records("ledger", StepDone)
        assert step.state_hash
        assert run.records("dead") == []
