"""Real processes killed before and after each kind of write: a sample; `python -m benchmarks chaos`
measures all of them. Aims come from the writes that a run was seen to make.
"""

import random
from collections import Counter
from pathlib import Path

import pytest

from testbed.kills.aims import Aim, AimFolder
from testbed.kills.every_kind import DEATHS, Swept, aims_of, packs, run_aimed, sweep_one
from testbed.kills.moments import MOMENTS
from testbed.run_process import random_model

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


def unseen_moments(calm: AimFolder) -> list[str]:
    return [
        f"{moment}: {process} does not {kind}"
        for moment, writes in MOMENTS.items()
        for process, kind in writes
        if not calm.writes(process)[kind]
    ]


def calm_run(base: Path, model: Path) -> AimFolder:
    """A run without kills. Eight steps may be over before dispatch first truncates, on a machine
    that was slow at that moment; then another run follows, at most three.
    """
    calm = run_aimed(base / "calm", model, ())
    for number in range(2):
        if not unseen_moments(calm):
            break
        calm = run_aimed(base / f"calm-{number}", model, ())
    return calm


@pytest.mark.long
def test_a_kill_before_or_after_a_kind_of_write_loses_nothing(tmp_path: Path) -> None:
    """Promise 1. Every role writes something, and the moments of the chaos benchmark are moments of
    a run.
    """
    model, found = random_model(tmp_path / "model"), Swept()
    calm = calm_run(tmp_path, model)
    assert set(calm.processes()) == ROLES
    assert unseen_moments(calm) == []
    runs = packs(aims_of(calm), DEATHS)
    for number in random.Random(7).sample(range(len(runs)), SAMPLE):
        sweep_one(tmp_path / f"run-{number}", model, runs[number], found)
    assert found.wrong == []
    assert found.killed > 0
