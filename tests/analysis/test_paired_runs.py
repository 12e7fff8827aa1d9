"""Two runs compared prompt by prompt: which pairs are made, and what they give."""

import json
from pathlib import Path

import numpy as np
import pytest

from rollstream.look.query.intervals import paired_difference
from rollstream.look.query.locate import locate_run
from rollstream.look.query.paired_runs import (
    GroupFigures,
    HeldOut,
    RunFigures,
    common_groups,
    paired_figures,
    read_figures,
)
from rollstream.look.query.session import QuerySession
from rollstream.run.cli.main import main
from rollstream.storage.metrics_file import MetricsFile
from testbed.repository import EXAMPLES
from tests.support.synthetic_run import evaluation, publish_run

A = [0.0, 0.5, 0.5, 1.0, 0.25, 0.75]
B = [0.5, 0.5, 1.0, 1.0, 0.25, 1.0]


def groups(rewards: list[float], prompt: str = "p") -> dict[int, GroupFigures]:
    return {n: GroupFigures(f"{prompt}{n}", r, 10 * r + n) for n, r in enumerate(rewards)}


def test_groups_of_one_prompt_are_pairs():
    first = RunFigures(groups(A), {})
    second = RunFigures(groups(B) | {3: GroupFigures("other", 9.0, 9.0)}, {})
    assert common_groups(first, second) == [0, 1, 2, 4, 5]
    reward, length = paired_figures(first, second, 0.95, 0.02)
    kept = [0, 1, 2, 4, 5]
    assert reward.found == paired_difference([A[n] for n in kept], [B[n] for n in kept])
    assert reward.equivalence is not None
    assert (length.name, length.equivalence) == ("length", None)


def test_runs_without_common_prompts_have_no_pairs():
    assert paired_figures(RunFigures(groups(A), {}), RunFigures(groups(B, "q"), {}), 0.95) == []


def test_the_newest_evaluation_of_the_same_prompts_is_compared():
    same = HeldOut("h", tuple(A))
    first = RunFigures({}, {10: same, 20: same, 30: HeldOut("h", tuple(A))})
    second = RunFigures({}, {10: same, 20: HeldOut("h", tuple(B)), 30: HeldOut("x", tuple(B))})
    (found,) = paired_figures(first, second, 0.9)
    assert (found.name, found.where, found.unit) == ("held-out, sampled", "step 20", "prompt")
    assert found.found == paired_difference(A, B, 0.9)


def test_figures_of_a_run_are_means_over_its_groups():
    """The shipped archive; recounted from the rows of `completions`."""
    with QuerySession(locate_run(str(EXAMPLES / "archive")), print) as session:
        found = read_figures(session)
        answer = session.answer('SELECT "group", reward, len(logprobs) FROM completions')
        rows = [row for some in answer.batches for row in some]
    assert found.evaluations == {}  # from before evaluations had prompts
    assert len({figures.prompt for figures in found.groups.values()}) == len(found.groups) == 164
    for group in (0, 77, 163):
        some = [row for row in rows if row[0] == group]
        assert found.groups[group].reward == pytest.approx(np.mean([r for _, r, _ in some]))
        assert found.groups[group].tokens == pytest.approx(np.mean([n for _, _, n in some]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two synthetic runs; the second is better by a tenth in every held-out prompt but one."""
    path = tmp_path_factory.mktemp("pairs")
    for name, more in (("one", 0.0), ("two", 0.1)):
        folder = publish_run(path / name, 20)
        rewards = [0.5 + more, 0.4 + more, 0.3 + more, 0.2 + more, 0.1 + more, 0.7]
        scores = [[0, 4, reward] for reward in rewards]
        with MetricsFile(folder.metrics / "eval.jsonl") as lines:
            lines.append(evaluation(20) | {"prompts": "h", "by_prompt": scores})
    return path / "one", path / "two"


def test_diff_prints_intervals_equivalence_and_power(runs, capsys):
    assert main(["diff", *map(str, runs), "--margin", "0.2", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    held_out = line["paired"][0]
    assert (held_out["name"], held_out["where"]) == ("held-out, sampled", "step 20")
    expected = paired_difference([0.0] * 6, [0.1] * 5 + [0.0])
    assert held_out["found"]["low"] == pytest.approx(expected.low)
    assert held_out["found"]["detectable"] == pytest.approx(expected.detectable)
    assert held_out["equivalence"]["is_shown"] is True
    assert 0.9 < held_out["equivalence"]["power"] <= 1
    assert line["fits"][0][0]["name"] == "reward"
    assert main(["diff", *map(str, runs), "--margin", "0.01"]) == 0
    shown = capsys.readouterr().out
    assert "not shown" in shown
    assert "sigmoid fits" in shown


def test_without_a_margin_nothing_is_said_of_equivalence(runs, capsys):
    assert main(["diff", *map(str, runs)]) == 0
    assert "equivalent" not in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--margin", "0"], ["--confidence", "1.5"]])
def test_impossible_levels_are_refused(words, runs, capsys):
    assert main(["diff", *map(str, runs), *words]) == 2
    assert words[0] in capsys.readouterr().err


def test_the_report_shows_what_is_trained(runs, capsys):
    assert main(["report", str(runs[0])]) == 0
    text = (runs[0] / "report.html").read_text()
    assert "Length and difficulty of what is trained" in text
    assert "Sigmoid fits of the reward" in text
    assert "pass@k, of each wave" in text
    capsys.readouterr()
