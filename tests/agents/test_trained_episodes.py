"""A whole run whose trajectories are episodes of a program: they are trained, and the audit of the
log finds nothing.
"""

import json
from pathlib import Path

import pytest

from rollstream.consumers.trainer.data.ready_groups import UNTRAINED_MAX
from rollstream.errors import EveryGroupDied
from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.settings import RolloutSettings
from rollstream.run.cli.main import main
from rollstream.streams.ledger_records import GroupClosed, StepDone
from rollstream.streams.records import Trajectory
from tests.support.tiny_run import DISPATCH, tiny_run

AGENT = AgentSettings(episode="tests.agents.programs:two_turns")


def test_episodes_of_a_program_are_trained_and_audit_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
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
    settings = {
        "run": "tiny", "bus": "sqlite:bus", "store": "file:store",
        "dispatch": {"max_lag": DISPATCH.max_lag}, "trainer": run.trainer.model_dump(mode="json"),
        "rollouts": rollout.model_dump(mode="json"),
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    capsys.readouterr()
    code = main(["audit", str(tmp_path), "--json"])
    assert code == 0, capsys.readouterr().out
    for sql, wanted in (
        ("SELECT count(*) AS n FROM turns WHERE fork = ''", 2 * len(records)),
        ("SELECT count(*) AS n FROM episodes WHERE turns = 2", len(records)),
    ):
        capsys.readouterr()
        assert main(["query", str(tmp_path), sql, "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[0])["n"] == wanted
    name = records[0].trajectory
    assert main(["inspect", str(tmp_path), name]) == 0
    assert "2 turns, 0 branches" in capsys.readouterr().out


def test_a_run_whose_episodes_all_die_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without an end it would use up prompts for ever."""
    monkeypatch.setitem(UNTRAINED_MAX, "dead", (6, 8))
    agent = AgentSettings(episode="tests.agents.programs:failing")
    rollout = RolloutSettings(slots=4, context_max=128, status_s=0.1)
    trainer = {"steps": 100, "groups_per_step": 1, "samples_per_group": 2}
    with tiny_run(tmp_path, agent=agent, rollout=rollout, trainer=trainer) as run:
        run.start_all(rollouts=1)
        with pytest.raises(EveryGroupDied, match=r"groups in a row ended dead.*ValueError"):
            run.train()
        closed = run.records("ledger", GroupClosed)
    assert len(closed) >= 8
    assert {one.reason for one in closed} == {"dead"}
