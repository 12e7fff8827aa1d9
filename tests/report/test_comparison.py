"""Two runs side by side, and several on one page."""

import json
from pathlib import Path

import pytest

from rollstream.look.report.comparison import compare_runs
from rollstream.look.report.summary import open_history
from rollstream.run.cli.main import main
from rollstream.run.config.run_folder import RunFolder
from rollstream.streams.ledger_records import first_difference
from tests.report.test_report import drawings
from tests.support.synthetic_run import publish_run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, RunFolder]:
    """The same run twice, the second one stopped after 40 steps."""
    path = tmp_path_factory.mktemp("runs")
    return publish_run(path / "long"), publish_run(path / "short", 40)


def test_a_run_does_not_differ_from_itself(folders):
    history = open_history(folders[0])
    found = compare_runs(("a", "b"), history, history)
    assert found.settings == ()
    assert found.outcomes[0] == found.outcomes[1]
    assert found.curves
    assert all(c.apart is None and c.mean[0] == c.mean[1] for c in found.curves)
    assert (found.states_apart, found.states_compared) == (None, 60)


def test_curves_are_compared_over_the_steps_that_both_have(folders):
    found = compare_runs(("a", "b"), *(open_history(folder) for folder in folders))
    reward = next(curve for curve in found.curves if curve.name == "reward")
    assert reward.compared == 40
    assert found.outcomes[0]["trained"] > found.outcomes[1]["trained"]


@pytest.mark.parametrize(
    ("first", "second", "step"),
    [
        ({1: ("a", ""), 2: ("b", "")}, {1: ("a", ""), 2: ("c", ""), 3: ("d", "")}, 2),
        ({1: ("a", "w")}, {1: ("", "w")}, None),
        ({1: ("a", "w")}, {1: ("", "x")}, 1),
        ({1: ("a", "")}, {1: ("", "w")}, 1),
        ({1: ("a", "")}, {2: ("b", "")}, None),
    ],
)
def test_the_first_difference_is_by_the_hashes_that_both_have(first, second, step):
    assert first_difference([first, second]) == step
    assert first_difference([first, first, second]) == step


def change(folder: RunFolder, **settings: object) -> None:
    values = json.loads(folder.configuration.read_text())
    values["trainer"] |= settings
    folder.configuration.write_text(json.dumps(values))


def test_settings_that_differ_are_named_with_both_values(folders, tmp_path: Path, capsys):
    other = publish_run(tmp_path / "other", 10)
    change(other, lr=0.125)
    assert main(["diff", str(folders[0].path), str(other.path), "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    differing = {one["key"]: one["second"] for one in line["settings"]}
    assert differing == {"trainer.lr": 0.125}
    assert main(["diff", str(folders[0].path), str(other.path)]) == 0
    assert "trainer.lr" in capsys.readouterr().out


def test_a_folder_without_a_run_is_refused_by_name(folders, tmp_path: Path, capsys):
    assert main(["diff", str(folders[0].path), str(tmp_path)]) == 2
    assert f"{tmp_path} holds no run" in capsys.readouterr().err


def test_several_runs_are_lines_of_the_same_charts(folders, tmp_path: Path, capsys):
    page = tmp_path / "both.html"
    paths = [str(folder.path) for folder in folders]
    assert main(["report", *paths, "--output", str(page)]) == 0
    text = page.read_text()
    drawn = drawings(text)
    assert len(drawn) >= 8
    for figure in drawn:
        assert len(figure.findall("path[@class]")) >= 2
    assert text.count("long") >= len(drawn)
    assert "Settings that differ" in text


def test_more_runs_than_colours_are_refused(folders, capsys):
    assert main(["report", *[str(folders[0].path)] * 9]) == 2
    assert "at most 8" in capsys.readouterr().err
