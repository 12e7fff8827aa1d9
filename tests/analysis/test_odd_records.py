"""Records that are sound in form and odd in content end no viewer: they are shown as they are, or
counted. What is printed has no control characters.
"""

import shutil
from pathlib import Path

import pytest

from rollstream.errors import EXIT_REFUSED
from rollstream.look.explorer import explored_run
from rollstream.run.cli.main import main
from tests.analysis.asked_run import archive
from tests.analysis.odd_run import make_odd_run

TOPICS = ("trajectories", "annotations", "admissions", "ledger", "assignments", "status", "dead")
VIEWS = ("trajectories", "annotations", "ledger", "admissions", "rewards", "takes", "steps")
CONTROL = {*map(chr, range(32)), *map(chr, range(0x7F, 0xA0)), "\u202e"} - {"\n", "\t"}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_odd_run(tmp_path_factory.mktemp("odd") / "run")


@pytest.fixture(scope="module")
def odd_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_odd_run(tmp_path_factory.mktemp("odd") / "archived")
    archive(folder)
    shutil.rmtree(folder / "bus")
    return folder


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Returns what a command printed; fails where it has a control character."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    assert not CONTROL & set(text)
    return text


@pytest.mark.parametrize("topic", TOPICS)
def test_every_odd_record_passes_in_tail(odd, capsys, topic):
    text = printed(capsys, "tail", topic, odd, "--from", "begin")
    printed(capsys, "tail", topic, odd, "--from", "begin", "--json")
    if topic == "trajectories":
        assert f"{1 << 55} ms" in text
        assert "\\u001b]0;owned\\u0007" in text


FORMS = ((), ("--json",), ("--csv",))


@pytest.mark.parametrize(
    ("view", "form"),
    [
        pytest.param(view, form, marks=() if number % 3 == at else pytest.mark.slow)
        for number, view in enumerate(VIEWS)
        for at, form in enumerate(FORMS)
    ],
    ids=str,
)
def test_every_odd_record_of_a_log_is_in_its_view(odd, capsys, view, form):
    printed(capsys, "query", odd, f"SELECT * FROM {view}", *form)


def test_an_odd_trajectory_is_inspected(odd, capsys):
    assert "\\u001b" in printed(capsys, "inspect", odd, "4.1")
    printed(capsys, "inspect", odd, "4.0")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["odd", "odd_archive"])
def test_a_run_with_odd_records_is_exported(request, kind, tmp_path, capsys):
    folder = request.getfixturevalue(kind)
    text = printed(capsys, "explore", folder, "--nice", "0", "--export", tmp_path / "out")
    assert text.startswith("exported: ")


def test_an_error_of_the_reading_thread_ends_an_export_with_the_error(
    odd, tmp_path, monkeypatch, capsys
):
    def refresh(reader):
        raise TypeError("a record of no known kind")

    monkeypatch.setattr(explored_run.IndexReader, "refresh", refresh)
    words = ["explore", str(odd), "--nice", "0", "--export", str(tmp_path / "out")]
    assert main(words) == EXIT_REFUSED
    assert "TypeError: a record of no known kind" in capsys.readouterr().err
