"""The arithmetic of `python -m benchmarks repack_model`: order of runs, resuming, sums of a log."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.repack import model
from benchmarks.repack.model import ARMS, ONCE, PLAIN, ROUND, arm_case, run_or_recall, run_order
from benchmarks.repack.model_arm import (
    EXAMPLE,
    ArmResult,
    Drafted,
    Moved,
    drafts_of,
    pass_steps,
    refilled,
    time_to_reward,
)
from benchmarks.runs.watched import Slots
from rollstream.run.config.config import load
from rollstream.streams.records import Assignment, Partial, StepDone, Trajectory
from rollstream.streams.values import Drafts, Sampling, Version

V1 = Version(1, 1)
RESULT = ArmResult(
    tokens_per_s=1_000.0, to_75_s=60.0, reward=0.8, length_median=100.0, length_p99=1_500.0,
    length_max=3_000, forced=0.0, batch=4.0, decode_us=200.0,
    train_us=100.0,
    slots=Slots(0.5, 0.0, 0.7, 0.0, 0.4, 0.1), moved=Moved(0, 0, 0), drafted=Drafted(0, 0, 0, 0),
)  # fmt: skip


def step(number: int, reward: float) -> StepDone:
    return StepDone(number, V1, "", 1, {"reward_mean": reward}, {}, 100.0 + number)


def partial(trajectory: str, attempt: int, start: int, tokens: int, last: bool) -> Partial:
    return Partial(
        trajectory, 0, attempt, "a", 1, None, start, np.zeros(tokens, np.uint32),
        np.zeros(0, np.uint8), np.zeros(tokens, np.float32), (), last=last,
    )  # fmt: skip


def assignment(kind: str, trajectory: str, attempt: int, onward: str = "") -> Assignment:
    return Assignment(
        kind, trajectory, 0, 0, attempt, "a", 1, V1, "", np.zeros(1, np.uint32), Sampling(), 0,  # type: ignore[arg-type]
        onward=onward,
    )  # fmt: skip


def answer(drafts: Drafts | None, tokens: int) -> Trajectory:
    return Trajectory(
        "0.0", 0, 0, 1, "", "a", 1, np.zeros(tokens, np.uint32), np.zeros(tokens, np.uint8),
        np.zeros(tokens, np.float32), (), "stop", 1.0, V1, 0.0, 1.0, drafts=drafts,
    )  # fmt: skip


def test_each_arm_has_a_plain_run_of_its_round_and_rounds_turn_round() -> None:
    order = run_order(4, ONCE)
    assert len(order) == len(set(order)) == 4 * len(ROUND) + len(ONCE)
    assert {(PLAIN, seed) for seed in range(4)} < set(order)
    rounds = [[arm for arm, seed in order if seed == wanted] for wanted in range(4)]
    assert rounds == [[*ROUND, *ONCE], [*ROUND[::-1]], [*ROUND], [*ROUND[::-1]]]
    assert {*ROUND, *ONCE} == set(ARMS)


def test_every_arm_is_a_configuration_and_plain_has_nothing_on() -> None:
    found = {arm: load(EXAMPLE, settings, {}) for arm, settings in ARMS.items()}
    plain, whole = found[PLAIN], found["all_on"]
    assert (plain.dispatch.repack, plain.dispatch.placement) == (False, "room")
    assert not plain.rollouts.is_drafting
    assert whole.dispatch.repack
    assert whole.dispatch.placement == "ranks"
    assert whole.rollouts.is_drafting
    kept = [arm for arm, c in found.items() if c.rollouts.on_update != "keep_version"]
    assert kept == ["in_flight"]
    assert pass_steps(plain) * plain.trainer.groups_per_step == plain.task.options["prompts"]


def test_a_kept_result_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def measured(folder: Path, settings: tuple[str, ...]) -> ArmResult:
        asked.append(settings)
        return RESULT

    monkeypatch.setattr(model, "run_arm", measured)
    (tmp_path / "warm" / "model").mkdir(parents=True)
    first = run_or_recall(tmp_path, "repack", 2)
    assert run_or_recall(tmp_path, "repack", 2) == first == RESULT
    assert len(asked) == 1
    assert {"seed=2", *ARMS["repack"]} < set(asked[0])
    run_or_recall(tmp_path, "repack", 3)
    assert len(asked) == 2


def test_a_result_survives_its_file() -> None:
    later = replace(RESULT, to_75_s=None, moved=Moved(3, 9, 4_000))
    assert msgspec.json.decode(msgspec.json.encode(later), type=ArmResult) == later


def test_a_case_compares_each_arm_with_its_own_plain_run() -> None:
    mine = [replace(RESULT, tokens_per_s=value, decode_us=50.0) for value in (1_300, 900, 2_000)]
    plain = [replace(RESULT, tokens_per_s=value) for value in (1_000, 1_000, 1_000)]
    case = arm_case("repack", mine, plain)
    assert (case.case, case.goal, case.met) == ("repack_model", 1.15, True)
    assert case.ratio == pytest.approx(1.3)
    assert "0.90 to 2.00 in 3 pairs" in case.note
    assert "by processor time 2.00 (2.00 to 2.00)" in case.note


def test_time_to_the_reward_needs_several_steps_in_a_row() -> None:
    rewards = [0.2, 0.9, 0.5, 0.7, 0.8, 0.8, 0.8]
    steps = [step(number, reward) for number, reward in enumerate(rewards, 1)]
    assert time_to_reward(steps, 90.0) == 17.0  # the mean of the last four reaches it
    assert time_to_reward(steps[:6], 90.0) is None


def test_only_what_resumes_elsewhere_counts_as_prefilled_again() -> None:
    assignments = [
        assignment("start", "moved", 1),
        assignment("release", "moved", 1, onward="b"),
        assignment("resume", "moved", 2),
        assignment("release", "ended", 1, onward="b"),  # it completed at its source
        assignment("release", "unneeded", 1),
        assignment("resume", "recovered", 2),
    ]
    partials = [
        partial("moved", 1, 5, 64, last=False),
        partial("moved", 1, 69, 10, last=True),
        partial("ended", 1, 5, 7, last=True),
        partial("recovered", 1, 5, 9, last=True),
    ]
    assert refilled(assignments, partials) == (1, 79)


def test_drafts_are_summed_over_the_answers_that_have_them() -> None:
    drafts = Drafts(runs=(1, 3, 2, 4), steps=5, guessed=9, asked=4, found=3, lookup_s=0.0)
    found = drafts_of([answer(drafts, 10), answer(None, 50), answer(drafts, 10)])
    assert found == Drafted(guessed=18, accepted=14, tokens=20, passes=10)
