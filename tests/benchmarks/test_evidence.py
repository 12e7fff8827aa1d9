"""The evidence: rows are recounted from their facts, cases from the rows, and a case that rests on
too few seeds is never met.
"""

import math
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from benchmarks.evidence import evidence, pieces, rows
from benchmarks.evidence.arms import ARMS, WORLDS, behind_8, held_back
from benchmarks.evidence.pieces import Piece, read_steps
from benchmarks.evidence.rows import FACTS, EvidenceRow, read_rows, recounted, row_path, write_row
from benchmarks.evidence_runs import main
from rollstream.analysis.locate import locate_run
from rollstream.analysis.session import QuerySession
from rollstream.consumers.trainer.data.selection import GroupCandidate
from testbed.repository import EXAMPLES

WORLD = "remainder-0.6M"
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
    case = evidence.lag_difference(pairs("lag8", differences))
    half = T_90[4] * np.std(differences, ddof=1) / math.sqrt(5)
    mean = np.mean(differences)
    assert case.value == pytest.approx(max(abs(mean - half), abs(mean + half)), abs=1e-6)
    assert "5 seeds" in case.note


def test_a_case_with_too_few_seeds_is_never_met():
    """A difference of 0 in two seeds lies within any margin, and decides nothing."""
    few = [*pairs("lag8", [0.0, 0.0]), *pairs("behind8", [0.0, 0.0])]
    stressed = [*pairs("stress_default", [0.0] * 4), *pairs("stress_uncorrected", [-0.5] * 4)]
    found = [
        evidence.lag_difference(few),
        evidence.lag_difference([]),
        evidence.stress("stress_default", stressed, at_least=-0.02),
        evidence.stress("stress_uncorrected", stressed, at_most=-0.2),
        evidence.paired_share(few),
        evidence.auroc(stressed),
    ]
    assert [case.met for case in found] == [None] * 6
    assert all(case.note.startswith("NOT DECIDED") for case in found)
    assert "2 seeds of 5" in found[0].note
    assert "4 seeds of 5" in found[2].note


def test_one_world_does_not_decide_the_question_of_lag():
    many = [*pairs("lag8", [0.0] * 5), *pairs("behind8", [0.001] * 5)]
    case = evidence.lag_difference(many)
    assert case.met is None
    assert "worlds 1 of 3" in case.note


def test_enough_seeds_decide():
    stressed = [*pairs("stress_default", [-0.01] * 5), *pairs("stress_uncorrected", [-0.3] * 5)]
    assert evidence.stress("stress_default", stressed, at_least=-0.02).met is True
    assert evidence.stress("stress_uncorrected", stressed, at_most=-0.2).met is True
    worse = pairs("stress_default", [-0.05] * 5)
    assert evidence.stress("stress_default", worse, at_least=-0.02).met is False


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
    high = pairs("stress_default", [0.0] * 5, ess=0.9)
    case = evidence.auroc([*low, *high])
    assert (case.value, case.met) == (1.0, True)
    assert "5 runs collapsed, 5 did not" in case.note


def test_a_rule_holds_back_what_its_name_says():
    candidates = [GroupCandidate(number, number // 24) for number in range(9 * 24)]
    assert behind_8(candidates, 24) == list(range(24))
    assert behind_8(candidates[1:], 24) == ()
    assert held_back(candidates[:10], 4, 5) == [0, 1, 2, 3]


@pytest.mark.parametrize("wanted", [1, 5000, 31000])
def test_the_evaluated_step_is_the_first_behind_the_wanted_tokens(wanted: int):
    with QuerySession(locate_run(str(EXAMPLES / "archive")), print) as session:
        steps = read_steps(session, wanted)
    tokens = steps["tokens_trained"]
    assert sum(tokens) >= wanted
    assert sum(tokens[:-1]) < wanted


def test_facts_of_a_run_have_the_trained_tokens_of_its_steps():
    with QuerySession(locate_run(str(EXAMPLES / "archive")), print) as session:
        found = session.arrow(pieces._FACTS, lambda relation: relation.to_arrow_table())
        steps = read_steps(session, 31000)
    found = found.cast(FACTS).to_pylist()
    for step, tokens in zip(steps["step"], steps["tokens_trained"], strict=True):
        assert sum(one["tokens_trained"] for one in found if one["step"] == step) == tokens
    assert len({(one["group"], one["index"]) for one in found}) == len(found) == 1312


def test_the_list_of_runs_starts_with_the_pairs_of_a_seed(capsys: pytest.CaptureFixture[str]):
    main(["--list", "--seeds", "2", "--arms", "lag0", "lag8"])
    listed = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    names = [
        Piece(WORLDS[WORLD], ARMS[arm], seed).name for seed in (0, 1) for arm in ("lag0", "lag8")
    ]
    assert listed == names
