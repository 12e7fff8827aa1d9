"""Drafts while processes are killed and trajectories move: a real run on the torch engine.

The rollout that fills the node's history dies in the middle of an insertion, dispatch and trainer
in the middle of a write, source and destination in the middle of a move, and once all of them.
"""

import time
from pathlib import Path

import pytest

from rollstream.streams.records import Trajectory
from rollstream.streams.values import accepted_tokens
from testbed.kills.aimed_moves import ASKED, GIVEN_UP, WENT_ON
from testbed.kills.aims import Aim, AimFolder
from testbed.kills.final_counts import counted
from tests.support.decided_model import decided_model
from tests.support.drafted_runs import accepted_after, completions, continued, drafted_run
from tests.support.plain_sampling import differing

STEPS, GROUPS = 16, 4
CONTEXT = 640
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT,
}  # fmt: skip
SETTINGS = [
    f"trainer.steps={STEPS}", f"trainer.groups_per_step={GROUPS}", "trainer.samples_per_group=4",
    "rollouts.count=3", "rollouts.slots=8", f"rollouts.context_max={CONTEXT}",
    "sampling.tokens_max=600", "dispatch.ready_groups_max=12",
]  # fmt: skip
AIMS = (
    Aim("trainer", "append ledger", nth=9),
    Aim("dispatch", ASKED, "after"),
    Aim("rollout-0", GIVEN_UP),
    Aim("rollout-1", WENT_ON),
)
COMPARED = 24  # samples of moved, of recovered and of other trajectories


@pytest.mark.long
def test_drafts_outlive_kills_and_moves_and_change_no_token(tmp_path: Path) -> None:
    """Promise 1; invariants 1, 2, 4 and 10."""
    model = decided_model(tmp_path / "model", SIZES)
    aims = AimFolder(tmp_path / "aims")
    aims.aim(*AIMS)
    with drafted_run(tmp_path, model, SETTINGS, aims) as run:
        run.start()
        run.wait_for_step(2)
        run.kill_writer("before")
        run.kill_writer("after")
        run.wait_for_step(5)
        run.newest().kill()
        assert run.history.exists(), "nobody was left to remove it"
        run.start()
        run.wait_for_step(8)
        run.kill_writer_anywhere()
        killed_s = time.time()
        run.wait_complete()
    assert not run.history.exists()
    trainer, dispatch, *of_a_move = aims.fired()[: len(AIMS)]
    assert trainer
    assert dispatch
    assert any(of_a_move)
    found = counted(run.folder, STEPS)
    assert found.is_clean, found.wrong
    assert (found.trained, found.expired, found.dead) == (STEPS * GROUPS, 0, 0)
    done = completions(run.folder)
    assert accepted_after(list(done.values()), killed_s) > 0
    assert_plain(run.folder, done)


def assert_plain(folder: Path, done: dict[str, Trajectory]) -> None:
    """Moved and recovered trajectories are among them, drafted like all others."""
    moved, recovered = continued(folder)
    rest = done.keys() - moved - recovered
    kinds = [sorted(done.keys() & some)[:COMPARED] for some in (moved, recovered, rest)]
    chosen = [[done[name] for name in names] for names in kinds]
    for some in chosen:
        assert sum(accepted_tokens(one.drafts) for one in some if one.drafts is not None) > 0
    assert differing(folder, [one for some in chosen for one in some]) == []
