"""The roles of a run may be started, killed and restarted in any order. No supervisor runs here
that would use the usual order or pass leases on.
"""

import random
import socket
from pathlib import Path

import pytest

from rollstream.producers.drafts.shared_memory import segment_folder
from testbed.kills.final_counts import counted
from testbed.run_process import GROUPS, by_hand, random_model

STEPS = 24
NAMES = ("trainer", "dispatch", "prompts", "archive", "rollout-0", "rollout-1")
SETTINGS = [
    f"trainer.steps={STEPS}", "trainer.samples_per_group=2", "sampling.tokens_max=24",
    "rollouts.partial_tokens=4", "archive.roll_s=0.5", "trainer.lease_s=2", "dispatch.lease_s=2",
    "rollouts.drafts=history", "rollouts.drafts_tokens=4096",
]  # fmt: skip


def shuffled(drawn: random.Random) -> list[str]:
    return drawn.sample(NAMES, len(NAMES))


@pytest.mark.long
def test_roles_start_die_and_start_again_in_any_order(tmp_path: Path) -> None:
    """Promise 1. All roles are killed in one order and started in another; then each is killed and
    restarted in a third order. The draft history is removed at the end, whichever rollout wrote it.
    """
    drawn, model = random.Random(0), random_model(tmp_path / "model")
    with by_hand(tmp_path / "run", model, SETTINGS) as run:
        for name in shuffled(drawn):
            run.start(name)
        run.wait_for_step(2)
        for name in shuffled(drawn):
            run.newest(name).kill()
        for name in shuffled(drawn):
            run.start(name)
        run.wait_for_step(6)
        for name in shuffled(drawn):
            run.newest(name).kill()
            run.start(name)
        run.wait_complete()
    found = counted(tmp_path / "run", STEPS)
    assert found.is_clean, found.wrong
    assert found.trained == STEPS * GROUPS
    assert not segment_folder("tiny", tmp_path / "run", socket.gethostname()).exists()
