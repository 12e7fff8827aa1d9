"""Drafts on vLLM while rollouts are killed and trajectories move: its cores are processes of their
own, which map the node's history. The rollout that fills it dies in the middle of an insertion,
then its successor at any moment; their cores die with them.
"""

import re
from pathlib import Path

import pytest

from testbed.kills.aims import AimFolder
from testbed.kills.final_counts import counted
from tests.support.decided_model import decided_model
from tests.support.drafted_runs import drafted_run

pytestmark = pytest.mark.long
STEPS, GROUPS, CONTEXT = 12, 4, 128
SIZES = {
    "hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "max_position_embeddings": CONTEXT,
}  # fmt: skip
SETTINGS = [
    f"trainer.steps={STEPS}", f"trainer.groups_per_step={GROUPS}", "trainer.samples_per_group=4",
    "rollouts.engine=vllm", "rollouts.count=2", "rollouts.slots=4",
    f"rollouts.context_max={CONTEXT}", "sampling.tokens_max=100", "dispatch.ready_groups_max=12",
]  # fmt: skip


def test_drafts_on_vllm_outlive_the_death_of_rollouts(tmp_path: Path) -> None:
    """Promise 1; invariants 1, 2 and 4."""
    model = decided_model(tmp_path / "model", SIZES)
    with drafted_run(tmp_path, model, SETTINGS, AimFolder(tmp_path / "aims")) as run:
        run.start()
        run.wait_for_step(2)
        first = run.kill_writer("before")
        second = run.kill_writer_anywhere()
        run.wait_complete()
    assert not run.history.exists()
    found = counted(run.folder, STEPS)
    assert found.is_clean, found.wrong
    assert (found.trained, found.dead) == (STEPS * GROUPS, 0)
    assert sum(right(run.folder, name) for name in (first, second)) > 0


def right(folder: Path, rollout: str) -> int:
    """Accepted draft tokens in its last life, from its log at the end."""
    output = (folder / "logs" / f"{rollout}.log").read_text()
    found = re.findall(r"drafts: .* (\d+) of \d+ draft tokens accepted", output)
    return int(found[-1]) if found else 0
