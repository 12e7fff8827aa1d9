"""The roles of a run over a Kafka broker and an S3 bucket, on third-party servers: two URLs change,
and the log holds the same counts afterwards. Their processes are in `test_faults_in_a_run.py`.
"""

from pathlib import Path

from rollstream.storage.weights.retention import listed_versions
from rollstream.streams.records import Admitted, GroupClosed, StepDone, Take, Trajectory
from testbed.servers import kafka_broker, versity
from tests.runs.test_resume import hashes, train_until, used
from tests.support.tiny_run import tiny_run

STEPS, GROUPS = 4, 3


def test_a_run_over_kafka_and_s3_trains_every_step_and_the_counts_add_up(tmp_path: Path) -> None:
    """Promise 4; invariants 1 and 2 over the log, with a trainer that is replaced."""
    with tiny_run(tmp_path, bus=kafka_broker.new_url(), store=versity.new_url()) as run:
        run.start_all()
        train_until(run, term=1, steps=2)
        assert run.train(term=2)
        run.end()
        assert max(used(run).values()) == 1, "a trajectory was trained twice"
        trained = [group.group for take in run.records("ledger", Take) for group in take.groups]
        assert len(trained) == len(set(trained)) == STEPS * GROUPS
        admitted = [record.group for record in run.records("admissions", Admitted)]
        assert len(set(admitted)) == len(admitted)
        closed = {record.group for record in run.records("ledger", GroupClosed)}
        assert not closed & set(trained)
        assert set(trained) | closed <= set(admitted)
        assert {done.step for done in run.records("ledger", StepDone)} == {1, 2, 3, 4}
        assert all(len(each) == 1 for each in hashes(run).values()), "a repeated step differs"
        finished = {record.trajectory for record in run.records("trajectories", Trajectory)}
        assert set(used(run)) <= finished
        assert {version.number for version in listed_versions(run.store)} >= {3, 4}
    assert not (tmp_path / "bus").exists()
    assert not (tmp_path / "store").exists()
