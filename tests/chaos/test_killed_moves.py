"""A kill in the middle of a move, in real processes with the paced engine: whichever of the three
processes dies at any of its records, every group is trained exactly once (invariants 1, 2, 4).
"""

from pathlib import Path

import pytest

from testbed.kills.aimed_moves import ASKED, GIVEN_UP, ORDERED, WENT_ON
from testbed.kills.aims import Aim, AimFolder
from testbed.kills.final_counts import counted
from testbed.run_driver import RunDriver

STEPS, GROUPS = 10, 8
MODULE = "testbed.kills.aimed_moves"
ROLLOUTS = ("rollout-0", "rollout-1")
TASK = """run = "moves"
[task]
name = "numbered"
options = { prompts = 32, prompt_tokens = 8 }
"""
SETTINGS = [
    "warmup.enabled=false", "evaluation.enabled=false", "rollouts.engine=paced",
    "rollouts.count=2", "rollouts.slots=8", "rollouts.context_max=2048",
    "rollouts.on_update=keep_version", "rollouts.partial_tokens=16", "rollouts.status_s=0.1",
    "sampling.tokens_max=1000", "trainer.learner=paced", f"trainer.steps={STEPS}",
    f"trainer.groups_per_step={GROUPS}", "trainer.samples_per_group=2", "dispatch.max_lag=null",
    "dispatch.ready_groups_max=24", "dispatch.repack_every_s=0.1", "dispatch.lease_s=2",
    "dispatch.heartbeat_timeout_s=2", "dispatch.keep_s=0.3", "archive.roll_s=1",
    "checkpoints.every=5", "paced.weights_bytes=100000",
    "paced.train_step_s=0.2", "paced.emit_every=8", "paced.time_scale=0.5",
    "paced.kv_tokens=20000", "paced.lengths.median=100", "paced.lengths.p99=1000",
]  # fmt: skip
"""Answers of seconds with a tail ten times as long: a rollout that has one is soon asked to give it
up.
"""


def of_rollouts(kind: str) -> list[Aim]:
    """Aims at each rollout; the first to make the write fires, and the other too if it makes it."""
    return [Aim(name, kind) for name in ROLLOUTS]


def run_killed(base: Path, aims: list[Aim]) -> AimFolder:
    """A run under its supervisor, to its end."""
    folder, configuration, module = AimFolder(base / "aims"), base / "moves.toml", MODULE
    folder.aim(*aims)
    configuration.write_text(TASK)
    with RunDriver(base / "run", configuration, SETTINGS, module=module, aim_folder=folder) as run:
        run.start()
        run.wait_complete()
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    "aims",
    [
        pytest.param(aims, id=name)
        for name, aims in [
            ("source-before-its-last-partial", of_rollouts(GIVEN_UP)),
            ("destination-before-its-first-partial", of_rollouts(WENT_ON)),
            ("dispatch-before-it-is-given-up", [Aim("dispatch", ASKED, "after")]),
            ("dispatch-before-the-resume", [Aim("dispatch", ORDERED)]),
        ]
    ],
)
def test_a_move_whose_source_destination_or_dispatch_is_killed_loses_nothing(
    tmp_path: Path, aims: list[Aim]
) -> None:
    """The source dies between the release and its last partial, the destination between the resume
    and its first one, dispatch behind the release or before the resume.
    """
    folder = run_killed(tmp_path, aims)
    assert any(folder.fired()), "nothing was moved"
    found = counted(tmp_path / "run", STEPS)
    assert found.is_clean, found.wrong
    assert (found.trained, found.expired, found.dead) == (STEPS * GROUPS, 0, 0)
