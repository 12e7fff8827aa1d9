"""Real processes killed before and after each kind of write: a sample; all of them are measured by
`python -m benchmarks chaos`. What is aimed at is what a run was seen to write.
"""

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.aiming import Aim
from tests.chaos.kinds import DEATHS, Swept, aims_of, packs, run_aimed, sweep_one
from tests.chaos.moments import MOMENTS
from tests.run_process import random_model

ROLES = {
    "archive", "dispatch", "prompts", "relay", "rollout-0", "scorer-0", "supervisor", "trainer"
}  # fmt: skip
SAMPLE = 2


def test_every_aim_is_in_one_run_and_no_process_dies_too_often_in_any() -> None:
    aims = [Aim(process, kind) for process in "abb" for kind in ("x", "y", process)]
    runs = packs(aims, 2)
    assert sorted(map(str, aims)) == sorted(str(aim) for run in runs for aim in run)
    assert max(Counter(aim.process for aim in run).most_common(1)[0][1] for run in runs) == 2
    assert len(runs) == 3


@pytest.mark.slow
def test_a_kill_before_or_after_a_kind_of_write_loses_nothing(tmp_path: Path) -> None:
    """Promise 1. Every role writes something, and the moments that the chaos benchmark aims at are
    moments of a run.
    """
    model, found = random_model(tmp_path / "model"), Swept()
    calm = run_aimed(tmp_path / "calm", model, ())
    assert set(calm.processes()) == ROLES
    for moment, writes in MOMENTS.items():
        for process, kind in writes:
            assert calm.writes(process)[kind], f"{moment}: {process} does not {kind}"
    runs = packs(aims_of(calm), DEATHS)
    for number in random.Random(7).sample(range(len(runs)), SAMPLE):
        sweep_one(tmp_path / f"run-{number}", model, runs[number], found)
    assert found.wrong == []
    assert found.killed > 0
