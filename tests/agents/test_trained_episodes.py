"""A whole run whose trajectories are episodes of a program: they are trained, and the audit of the
log finds nothing.
"""

from pathlib import Path

from rollstream.producers.agents.settings import AgentSettings
from rollstream.producers.settings import RolloutSettings
from rollstream.streams.ledger_records import StepDone
from rollstream.streams.records import Trajectory
from tests.support.tiny_run import tiny_run

AGENT = AgentSettings(episode="tests.agents.programs:two_turns")


def test_episodes_of_a_program_are_trained(tmp_path: Path):
    rollout = RolloutSettings(slots=4, context_max=128, status_s=0.1)
    trainer = {"steps": 2, "groups_per_step": 2, "samples_per_group": 2,
               "filter_equal_rewards": False}  # fmt: skip
    with tiny_run(tmp_path, agent=AGENT, rollout=rollout, trainer=trainer) as run:
        run.start_all(rollouts=1)
        assert run.train()
        records = [r for r in run.records("trajectories", Trajectory) if r.finish != "dead"]
        steps = run.records("ledger", StepDone)
    assert len(records) >= 8
    assert {len(record.turns) for record in records} == {2}
    assert len(steps) == 2
