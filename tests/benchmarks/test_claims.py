"""Measured figures in README and docs come from the last run of each case."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.case import against, alone
from benchmarks.claims import CLAIM_PAGES, unheld_figures
from benchmarks.last_runs import Circumstances, LastRun, keep, present, read_runs
from benchmarks.result_tables import (
    goal_text,
    missed_lines,
    number_text,
    readme_lines,
    readme_names,
)
from testbed.repository import ROOT

MEASURED = Circumstances("2026-11-29", "2 cores, no GPU", 0.1, "65b7a3ec2")
RUNS = {
    "bus_read": LastRun(
        against("bus_read", 5123.4, "records/s", "SQLite", 15068.0, 0.5, "ratio .31 to .36"),
        MEASURED,
    ),
    "pipeline_busy": LastRun(alone("pipeline_busy", 0.834, "share", at_least=0.85), MEASURED),
}


def unheld(text: str, page: str = "README.md") -> list[str]:
    return [one.figure for one in unheld_figures({page: text}, RUNS)]


def test_every_figure_of_readme_and_docs_is_held() -> None:
    """If this fails: write the figure of `benchmarks/results`, name its case in the row or the
    sentence, or leave the figure to a generated table.
    """
    assert [str(one) for one in unheld_figures()] == []


@pytest.mark.parametrize(
    "text",
    [
        "Reads reach .34 of SQLite (`bus_read`), .31 to .36 in pairs; the goal is .5.",
        "| reads (`bus_read`) | 5.1k | 15 068 records/s |",
        "* Both cores train 83 % of the time (`pipeline_busy`).",
        "It runs with Python 3.11, Kafka 4.3.0 and two cores, see verl#7579 and 5 of 9 pages.",
        "```\nbus_read 1.62 ×\n```\n[a page](page.md#3.5-s)",
    ],
)
def test_a_figure_of_the_last_run_is_held(text: str) -> None:
    assert unheld(text) == []


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("Reads reach .44 of SQLite (`bus_read`).", [".44"]),
        ("| reads (`bus_read`) | .34 | 4.1k |", ["4.1k"]),
        ("Reads (`bus_read`) take .34.\n\nBoth cores train 83 % of the time.", ["83 %"]),
        (
            "Faster: 9.1 ×, 4.4x, 24 times, 30%, 12 seconds, 14,072 tokens/s.",
            [
                "9.1 ×",
                "4.4x",
                "24 times",
                "30%",
                "12 seconds",
                "14,072 tokens/s",
            ],
        ),
        ("* Reads (`bus_read`): .34\n* a step takes 40 ms", ["40 ms"]),
    ],
)
def test_a_figure_without_a_run_is_named(text: str, figures: list[str]) -> None:
    assert unheld(text) == figures


def test_other_pages_answer_for_the_sentences_that_name_a_case() -> None:
    text = "A look-up takes 4.6 µs. Of the cores .91 train (`pipeline_busy`). Then 3 s pass."
    assert unheld(text, "docs/explanation/architecture.md") == [".91"]
    assert unheld(text, CLAIM_PAGES[0]) == ["4.6 µs", ".91", "3 s"]


def test_limits_names_every_missed_goal() -> None:
    page = (ROOT / "docs" / "explanation" / "limits.md").read_text(encoding="utf-8")
    missed = [case for case, run in read_runs().items() if run.case.met is False]
    assert len(missed) > 5
    assert [case for case in missed if f"(`{case}`)" not in page] == []
    assert "\n".join(missed_lines()) in page


def test_each_verdict_is_that_of_the_goal_in_the_catalogue() -> None:
    """A goal that changed makes a verdict stale: then the case is measured again."""
    wrong: list[str] = []
    for name, run in read_runs().items():
        case, goal = run.case, re.match(r"([≥≤]?) ?([−\d.,e-]+)", goal_text(name))
        if case.met is not None and goal is not None:
            bound = float(goal[2].rstrip(",").replace(",", "").replace("−", "-"))
            value = case.value if case.ratio is None else case.ratio
            kinds = {"≥": value >= bound, "≤": value <= bound, "": value == bound}
            wrong += [name] if (kinds[goal[1]], bound) != (case.met, case.goal) else []
    assert wrong == []


def test_readme_dates_each_figure() -> None:
    rows = [line.strip("| ").split(" | ") for line in readme_lines()][2:]
    assert all(row[-1].startswith("2026-") and row[1] for row in rows)
    assert {"pipeline", "chaos", "histospec"} <= set(readme_names())


def test_a_case_replaces_its_last_run_and_leaves_the_others(tmp_path: Path) -> None:
    keep("bus", RUNS["bus_read"].case, MEASURED, tmp_path)
    computed = alone("bus_write", np.float32(1.5), "records/s", at_least=np.float32(1))  # type: ignore[arg-type]
    keep("bus", computed, MEASURED, tmp_path)
    keep("bus", alone("bus_read", float("nan"), "records/s", note="“new”"), MEASURED, tmp_path)
    runs = read_runs(tmp_path)
    assert list(runs) == ["bus_write", "bus_read"]  # as in the catalogue
    assert runs["bus_read"].case.note == "“new”"
    assert runs["bus_read"].case.value != runs["bus_read"].case.value
    assert runs["bus_write"].measured == MEASURED
    assert (runs["bus_write"].case.value, runs["bus_write"].case.met) == (1.5, True)


def test_a_benchmark_keeps_its_cases_and_a_quick_one_none(tmp_path: Path) -> None:
    main(["planner", "--quick", "--results", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []
    main(["planner", "--json", "--results", str(tmp_path)])
    (line,) = (tmp_path / "planner.jsonl").read_text(encoding="utf-8").splitlines()
    kept = json.loads(line)
    now = present()
    assert (kept["case"], kept["goal"]) == ("planner_10000_ms", 100)
    assert (kept["machine"], kept["commit"]) == (now.machine, now.commit)
    assert kept["load"] >= 0
    assert kept["value"] > 0


def test_a_number_never_looks_like_the_goal_that_it_misses() -> None:
    assert number_text(1.0983, 1.1) == "1.098"
    assert [number_text(n) for n in (0.968, -0.0019, 14071.4, 3e-7, 24.0, 0.0)] == [
        ".968",
        "−.0019",
        "14 071",
        "3e-7",
        "24",
        "0",
    ]
