"""The evidence: rows are recounted from their facts, cases from the rows, and a case that rests on
too few seeds is never met.
"""

import math
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from benchmarks.evidence import evidence
from benchmarks.runs.quickstart import QUICKSTART
from rollstream.consumers.objective_settings import OBJECTIVE_PRESETS
from rollstream.producers.engines.base import UpdateMode
from rollstream.producers.tasks.base import Score, Task, Turns
from rollstream.producers.tasks.registry import load_task
from rollstream.run.config.config import load
from rollstream.run.roles.context import prompt_tokens_max
from rollstream.run.warmup.warmup import SftSchedule, warm_up
from studies.evidence import rows
from studies.evidence.arms import ARMS, PRESETS, ROLES, WORLDS, World, preset_settings
from studies.evidence.generation import Generator, LaggedBatches, RunningBatch
from studies.evidence.log import read_log, write_log
from studies.evidence.page import PAGE, with_table
from studies.evidence.pieces import Piece
from studies.evidence.rows import FACTS, EvidenceRow, read_rows, recounted, row_path, write_row
from studies.evidence.stepped_run import Schedule, SteppedRun
from studies.evidence_runs import main

WORLD = "remainder-0.6M"
TINY = (
    "model.config.hidden_size=16", "model.config.intermediate_size=16",
    "model.config.num_hidden_layers=1", "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=1", "model.config.head_dim=8", "sampling.tokens_max=8",
    "trainer.groups_per_step=2", "trainer.samples_per_group=2", "trainer.workers=1",
)  # fmt: skip
T_90 = {4: 2.131847, 1: 6.313752}  # upper 5 % of Student's t, from printed tables


def row(arm: str, seed: int, accuracy: float, ess: float = 1.0) -> EvidenceRow:
    """Two prompts with ten answers each, two steps of ten tokens."""
    right = round(10 * accuracy)
    by_prompt = ((right, 10, accuracy), (right, 10, accuracy))
    steps: dict[str, list[float | None]] = {
        "tokens_trained": [10.0, 10.0], "ess": [ess, 0.5], "lag_consumed_mean": [0.0, 4.0],
    }  # fmt: skip
    return EvidenceRow(
        WORLD, arm, seed, (), 15, 2, 20, accuracy, accuracy, "ab", by_prompt, steps, "00", "",
        60.0, "unknown", {},
    )  # fmt: skip


def facts(tokens: int = 20) -> pa.Table:
    """Two trained trajectories, and one of a step behind the evaluated version."""
    columns = {
        "group": [0, 0, 1], "index": [0, 1, 0], "wave": [0, 0, 0], "prompt": [7, 7, 8],
        "fate": ["trained"] * 3, "finish": ["stop"] * 3, "tokens": [10, 10, 5],
        "tokens_trained": [10, tokens - 10, 5], "reward": [1.0, 0.0, 1.0], "step": [1, 2, 3],
        "version": [0, 1, 1], "lag": [0.0, 4.0, 1.0],
    }  # fmt: skip
    return pa.table(columns).cast(FACTS)


def pairs(arm: str, differences: list[float], ess: float = 1.0) -> list[EvidenceRow]:
    reference = ARMS[arm].reference
    found: list[EvidenceRow] = []
    for seed, difference in enumerate(differences):
        found.append(row(reference, seed, 0.6 + 0.01 * seed))
        found.append(row(arm, seed, 0.6 + 0.01 * seed + difference, ess))
    return found


def test_a_written_row_is_read_and_recounted(tmp_path: Path):
    written = write_row(row("lag0", 3, 0.7), facts(), tmp_path)
    assert written == row_path(WORLD, "lag0", 3, tmp_path)
    (found,) = read_rows(tmp_path)
    assert (found.seed, found.accuracy, found.lag) == (3, 0.7, 2.0)
    assert found.ess == pytest.approx(0.75)
    assert recounted(found, tmp_path) == ""


def test_a_row_that_its_facts_do_not_bear_out_is_found(tmp_path: Path):
    write_row(row("lag0", 0, 0.7), facts(19), tmp_path)
    (found,) = read_rows(tmp_path)
    assert recounted(found, tmp_path) == "19 trained tokens in its facts, 20 in the row"
    write_row(row("lag0", 0, 0.7), facts(), tmp_path)
    (found,) = read_rows(tmp_path)
    other = msgspec.structs.replace(found, accuracy=0.8)
    assert recounted(other, tmp_path) == "accuracy 0.8, by its prompts 0.700000"
    row_path(WORLD, "lag0", 0, tmp_path).with_suffix(".parquet").write_bytes(b"")
    assert recounted(found, tmp_path) == "its facts are missing or others"


def test_a_row_of_another_format_is_refused(tmp_path: Path):
    path = write_row(msgspec.structs.replace(row("lag0", 0, 0.7), format=2), facts(), tmp_path)
    with pytest.raises(ValueError, match=f"{path.name} has format 2"):
        list(read_rows(tmp_path))


def test_the_archive_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows, "BYTES_MAX", 100)
    with pytest.raises(ValueError, match="above 100"):
        write_row(row("lag0", 0, 0.7), facts(), tmp_path)
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == []


def test_the_committed_rows_recount():
    found = list(read_rows())
    assert [(r.world, r.arm, r.seed, what) for r in found if (what := recounted(r))] == []
    assert sum(p.stat().st_size for p in rows.RUNS.rglob("*") if p.is_file()) < rows.BYTES_MAX


def test_a_difference_is_the_far_end_of_its_interval():
    """Recounted by hand: mean ± t · s / √n."""
    differences = [-0.01, 0.0, 0.004, -0.002, 0.003]
    case = evidence.lag_difference(pairs("lag8_topr", differences))
    half = T_90[4] * np.std(differences, ddof=1) / math.sqrt(5)
    mean = np.mean(differences)
    assert case.value == pytest.approx(max(abs(mean - half), abs(mean + half)), abs=1e-6)
    assert "5 seeds" in case.note


def test_a_case_with_too_few_seeds_is_never_met():
    """A difference of 0 in two seeds lies within any margin, and decides nothing."""
    few = [*pairs("lag8_topr", [0.0, 0.0]), *pairs("lag16", [0.0, 0.0])]
    stressed = [*pairs("stress_topr", [0.0] * 4), *pairs("stress_uncorrected", [-0.5] * 4)]
    found = [
        evidence.lag_difference(few),
        evidence.lag_difference([]),
        evidence.stress("stress_default", "stress_topr", stressed, at_least=-0.02),
        evidence.stress("stress_uncorrected", "stress_uncorrected", stressed, at_most=-0.2),
        evidence.paired_share(few),
        evidence.auroc(stressed),
        evidence.like_roles([]),
    ]
    assert [case.met for case in found] == [None] * 7
    assert all(case.note.startswith("NOT DECIDED") for case in found)
    assert "2 seeds of 5" in found[0].note
    assert "4 seeds of 5" in found[2].note


def test_one_world_does_not_decide_the_question_of_lag():
    many = [*pairs("lag8_topr", [0.0] * 5), *pairs("lag16", [0.001] * 5)]
    case = evidence.lag_difference(many)
    assert case.met is None
    assert "worlds 1 of 3" in case.note


def test_enough_seeds_decide():
    stressed = [*pairs("stress_topr", [-0.01] * 5), *pairs("stress_uncorrected", [-0.3] * 5)]
    assert evidence.stress("stress_default", "stress_topr", stressed, at_least=-0.02).met is True
    uncorrected = evidence.stress(
        "stress_uncorrected", "stress_uncorrected", stressed, at_most=-0.2
    )
    assert uncorrected.met is True
    worse = pairs("stress_topr", [-0.05] * 5)
    assert evidence.stress("stress_default", "stress_topr", worse, at_least=-0.02).met is False


def test_pairing_halves_what_seeds_share():
    """The accuracy of the reference rises with the seed, and so does that of its pair."""
    random = np.random.default_rng(0)
    shared = pairs("lag8", random.normal(0, 0.001, 5).tolist())
    case = evidence.paired_share(shared)
    first = [0.6 + 0.01 * seed for seed in range(5)]
    second = [one.accuracy for one in shared if one.arm == "lag8"]
    apart = np.var(first, ddof=1) + np.var(second, ddof=1)
    together = np.var(np.subtract(second, first), ddof=1)
    assert case.value == pytest.approx(together / apart)
    assert case.met is True


def test_runs_with_other_prompts_are_no_pair():
    first, second = row("lag0", 0, 0.6), row("lag8", 0, 0.6)
    other = msgspec.structs.replace(second, prompts="cd")
    assert len(evidence.comparisons([first, second], ["lag8"])[0].pairs) == 1
    assert evidence.comparisons([first, other], ["lag8"])[0].pairs == ()


def test_the_area_is_the_share_of_ordered_pairs():
    risks, collapsed = np.array([0.9, 0.5, 0.5, 0.1]), np.array([True, True, False, False])
    assert evidence.area(risks, collapsed) == pytest.approx((1 + 1 + 0.5 + 1) / 4)
    assert math.isnan(evidence.area(risks, np.array([True] * 4)))


def test_a_low_ess_predicts_the_runs_that_collapse():
    low = pairs("stress_uncorrected", [-0.5] * 5, ess=0.2)
    high = pairs("stress_topr", [0.0] * 5, ess=0.9)
    case = evidence.auroc([*low, *high])
    assert (case.value, case.met) == (1.0, True)
    assert "5 runs collapsed, 5 did not" in case.note


class Parity:
    """A task whose answers are right by chance, so that an untrained model has gradients."""

    def judge(self, reference: str, turns: Turns) -> Score:
        return Score(float(sum(turns[0]) % 2))


def tiny_run(tmp_path: Path, schedule: Schedule, *settings: str) -> SteppedRun:
    """Untrained, of two groups of two answers a step, with its model in `tmp_path`."""
    values = [*TINY, f"dispatch.max_lag={2 * schedule.lag}", *settings]
    c, model = load(QUICKSTART, values), tmp_path / "model"
    task = load_task(c.task, prompt_tokens_max(c))
    warm_up(task, c.model, 0, model, 1, schedule=SftSchedule(documents=20, steps=1))
    run = SteppedRun(load(QUICKSTART, [*values, f"model.path={model}"]), tmp_path, schedule)
    generator(run).task = cast(Task, Parity())
    return run


def generator(run: SteppedRun) -> Generator:
    assert isinstance(run.source, LaggedBatches | RunningBatch)
    return run.source.generator


def trained_hash(run: SteppedRun, tokens: int = 150) -> str:
    list(run.train(tokens))
    found = run.learner.state_hash()
    run.learner.close()
    return found


@pytest.mark.parametrize("lag", [0, 2])
def test_every_token_of_a_step_has_the_lag_that_the_arm_names(tmp_path: Path, lag: int):
    run = tiny_run(tmp_path, Schedule(lag))
    steps = list(run.train(150))
    assert len(steps) > 4
    for step in steps:
        expected = max(0, step.step - 1 - lag)
        found = {s.version.number for group in step.groups for one in group for s in one.spans}
        assert found == {expected}
        assert {fact["lag"] for fact in step.facts} == {step.step - 1 - expected}
    assert sum(step.tokens for step in steps) >= 150 > sum(step.tokens for step in steps[:-1])


@pytest.mark.parametrize("mode", ["keep_version", "in_flight", "in_flight_recompute"])
def test_a_running_batch_changes_versions_as_its_policy_says(tmp_path: Path, mode: UpdateMode):
    run = tiny_run(tmp_path, Schedule(1, mode, slots=3), f"rollouts.on_update={mode}")
    steps = list(run.train(300))
    spans = [len(one.spans) for step in steps for group in step.groups for one in group]
    assert (max(spans) > 1) == (mode != "keep_version")
    lags = [fact["lag"] for step in steps[4:] for fact in step.facts]
    assert 1 <= np.mean(lags) <= 2.5
    assert all(fact["fate"] == "trained" for step in steps for fact in step.facts)


def test_a_run_has_the_same_bits_when_it_is_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where the engine is polled again and again, as if each poll ran out of its time."""
    schedule = Schedule(1, "in_flight", slots=3)
    first = trained_hash(tiny_run(tmp_path, schedule))
    run = tiny_run(tmp_path, schedule)
    engine = generator(run).engine
    monkeypatch.setattr(engine, "poll", lambda deadline_s, poll=engine.poll: poll(0.0))
    assert trained_hash(run) == first
    assert trained_hash(tiny_run(tmp_path, schedule, "seed=1")) != first


def test_recorded_trajectories_are_trained_under_another_loss(tmp_path: Path):
    run = tiny_run(tmp_path, Schedule(2))
    steps = list(run.train(150))
    path = tmp_path / "log.parquet"
    write_log(path, [step.groups for step in steps])
    recorded = read_log(path, groups_per_step=2)
    again = SteppedRun(run.configuration, tmp_path, Schedule(2), recorded)
    same = run.learner.state_hash()
    run.learner.close()
    assert trained_hash(again) == same
    settings = [*TINY, "dispatch.max_lag=4", *preset_settings("gspo")]
    other = load(QUICKSTART, [*settings, f"model.path={tmp_path / 'model'}"])
    assert trained_hash(SteppedRun(other, tmp_path, Schedule(2), recorded)) != same


@pytest.mark.parametrize("world", WORLDS.values(), ids=lambda world: world.name)
def test_an_arm_has_every_setting_of_its_preset(world: World):
    """Also those that the world's configuration sets; those spelled out change nothing."""
    without = load(world.configuration).trainer
    for name in PRESETS:
        trainer = load(world.configuration, preset_settings(name)).trainer
        found = {key: getattr(trainer, key) for key in OBJECTIVE_PRESETS[name]}
        as_written = {key: [*v] if isinstance(v, tuple) else v for key, v in found.items()}
        assert as_written == OBJECTIVE_PRESETS[name], name
        assert (trainer.preset, trainer.lr) == (name, without.lr)
        assert load(world.configuration, (f"trainer.preset={name}",)).trainer == trainer


def test_the_product_trained_what_the_stepped_run_trains():
    """Of the committed run by processes; a missing trajectory is a difference."""
    found = [one for one in read_rows() if one.arm in ("lag0", ROLES)]
    case = evidence.like_roles(found)
    assert case.met is True
    other = [msgspec.structs.replace(r, step=r.step - 2) if r.arm == "lag0" else r for r in found]
    assert evidence.like_roles(other).met is False


def test_what_pairs_show_is_named():
    def verdict(differences: list[float]) -> str:
        return evidence.comparisons(pairs("lag8", differences), ["lag8"])[0].verdict

    assert verdict([0.0, 0.001, -0.001, 0.0, 0.0005]) == "within ±0.02"
    assert verdict([0.01, 0.011, 0.012, 0.01, 0.011]) == "higher, within ±0.02"
    assert verdict([-0.1, -0.11, -0.12, -0.1, -0.11]) == "lower"
    assert verdict([-0.1, 0.11, -0.12, 0.1, -0.11]) == "not significant, not equivalent"
    assert verdict([-0.1, -0.11, -0.12, -0.1]) == "not decided: too few seeds"


def test_the_page_has_the_table_of_the_committed_rows():
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_table(text, list(read_rows())), "run `python -m studies.evidence.page`"


def test_the_list_of_runs_starts_with_the_pairs_of_a_seed(capsys: pytest.CaptureFixture[str]):
    main(["--list", "--seeds", "2", "--arms", "lag0", "lag8"])
    listed = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    names = [
        Piece(WORLDS[WORLD], ARMS[arm], seed).name for seed in (0, 1) for arm in ("lag0", "lag8")
    ]
    assert listed == names
