"""Steps are trained again to the same bits, from the log or the archive, and the run stays
unchanged.
"""

import json
import shutil
from pathlib import Path

import pytest

from rollstream.keep.replay.recorded_steps import read_recorded
from rollstream.run.cli.main import main
from rollstream.storage.stores.connect import open_store
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import catalogue
from tests.support.kept_run import STEPS, made
from tests.support.killed_at import run_killed_at


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its log is truncated, its archive is whole."""
    return made(tmp_path_factory.mktemp("forgetful"), archive=True, truncate=True)


def replay(run: Path, out: Path, *words: str) -> list[str]:
    return ["replay", str(run), "--out", str(out), "--json", *words]


def printed_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def contents(run: Path) -> tuple:
    """Every record, and every object's key and bytes."""
    bus = open_bus(f"sqlite:{run / 'bus'}")
    records = [
        (m.topic, m.partition, m.offset, m.value)
        for topic in catalogue()
        for p, begin in bus.begin(topic.name).items()
        if begin < bus.end(topic.name)[p]
        for m in bus.read(topic.name, {p: begin}, records_max=100_000, bytes_max=1 << 30)
    ]
    bus.close()
    store = open_store(f"file:{run / 'store'}")
    return records, [(entry.key, store.get(entry.key)) for entry in store.list("")]


def truncated(run: Path) -> dict[str, int]:
    bus = open_bus(f"sqlite:{run / 'bus'}")
    begin = {t: sum(bus.begin(t).values()) for t in ("ledger", "trajectories")}
    bus.close()
    return begin


def test_nothing_changed_gives_every_hash_again_and_leaves_the_run(run: Path, tmp_path, capsys):
    before = contents(run)
    assert main(replay(run, tmp_path / "all", "--from-step", "0")) == 0
    found = printed_json(capsys)
    assert (found["start"], found["compared"], found["differing"]) == (0, STEPS, [])
    assert main(replay(run, tmp_path / "some", "--from-step", "5")) == 0
    found = printed_json(capsys)
    assert (found["checkpoint"], found["trained_again"]) == ("s00000004-t0001", 1)
    assert (found["steps"], found["compared"]) == (1, 2)
    assert contents(run) == before


def test_truncated_records_are_read_from_the_archive(forgetful: Path, tmp_path, capsys):
    assert all(truncated(forgetful).values())
    assert main(replay(forgetful, tmp_path / "again", "--from-step", "0")) == 0
    assert printed_json(capsys)["compared"] == STEPS


def test_an_archive_without_a_log_is_enough(forgetful: Path, tmp_path: Path, capsys):
    shutil.copytree(forgetful, tmp_path / "left")
    shutil.rmtree(tmp_path / "left" / "bus")
    assert main(replay(tmp_path / "left", tmp_path / "again", "--from-step", "0")) == 0
    assert printed_json(capsys)["compared"] == STEPS
    assert not (tmp_path / "left" / "bus").exists()


def test_records_that_were_not_kept_are_reported(forgetful: Path, tmp_path: Path, capsys):
    """Neither the log nor the archive has the first steps."""
    shutil.copytree(forgetful, tmp_path / "left")
    shutil.rmtree(tmp_path / "left" / "store" / "archive")
    assert main(replay(tmp_path / "left", tmp_path / "again", "--from-step", "0")) == 1
    assert "step 1 cannot be trained again" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_other_arithmetic_is_named_step_by_step(run: Path, tmp_path: Path, capsys):
    """The configuration in the folder was changed without the ledger."""
    shutil.copytree(run, tmp_path / "changed")
    path = tmp_path / "changed" / "config.json"
    values = json.loads(path.read_text())
    values["trainer"]["lr"] *= 2
    path.write_text(json.dumps(values))
    assert main(replay(tmp_path / "changed", tmp_path / "out", "--from-step", "4")) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["differing"] == [5, 6]
    assert "changed its configuration" in printed.err


def test_an_experiment_begins_after_its_step_and_stands_beside_the_run(
    run: Path, tmp_path: Path, capsys
):
    words = ("--from-step", "5", "--set", "trainer.lr=0.01", "--where", "tokens<9000")
    assert main(replay(run, tmp_path / "out", *words)) == 0
    found = printed_json(capsys)
    assert found["experiment"]
    assert (found["compared"], found["differing"]) == (1, []), "step 5 is still the run's own"
    assert "0.01" in (tmp_path / "out" / "beside.html").read_text()
    assert json.loads((tmp_path / "out" / "replay.json").read_text())["where"] == ["tokens<9000"]
    lines = (tmp_path / "out" / "metrics" / "trainer.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 6]
    norms = [json.loads(line)["gradient_norm"] for line in lines]
    assert all(norms), "nothing was learnt, so equal hashes would say nothing"
    assert main(["report", str(tmp_path / "out"), "--output", f"{tmp_path}/a.html"]) == 0


def test_a_filter_that_leaves_nothing_moves_nothing(run: Path, tmp_path: Path, capsys):
    words = ("--from-step", "4", "--where", "tokens<0")
    assert main(replay(run, tmp_path / "out", *words)) == 0
    lines = (tmp_path / "out" / "metrics" / "trainer.jsonl").read_text().splitlines()
    assert [json.loads(line)["updates_skipped"] for line in lines] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--from-step", "9"], "the ledger has steps 1 to 6"),
        (["--from-step", "4", "--to-step", "4"], "from < to"),
        (["--from-step", "4", "--set", "trainer.groups_per_step=2"], "a replay cannot change it"),
        (["--from-step", "4", "--where", "rewrd>0"], "reward"),
    ],
)
def test_a_wish_that_means_nothing_is_refused(run, tmp_path, capsys, words, expected):
    assert main(replay(run, tmp_path / "out", *words)) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def killed(command: list[str], steps: int) -> None:
    """A real process, killed once it has written this many lines of metrics."""
    run_killed_at("rollstream.storage.metrics_file:MetricsFile.append", steps, command)


def own_hashes(out: Path) -> dict[int, list[str]]:
    """By step, the state hashes in a replay's own ledger."""
    bus = open_bus(f"sqlite:{out / 'bus'}")
    recorded = read_recorded(bus)
    bus.close()
    takes = {step: [(t.update, t.micro_batch) for t in ts] for step, ts in recorded.takes.items()}
    assert all(len(set(named)) == len(named) for named in takes.values()), "a take is there twice"
    return {step: [one.state_hash for one in done] for step, done in recorded.done.items()}


CUT = [
    pytest.param(1, (), marks=pytest.mark.long),
    (3, ("--set", "trainer.lr=0.01")),
]


@pytest.mark.parametrize(("steps", "more"), CUT)
@pytest.mark.slow
def test_a_killed_replay_resumes_to_the_same_hashes(steps, more, run, tmp_path, capsys):
    before, out = contents(run), tmp_path / "killed"
    words = ("--from-step", "2", *more)
    killed(replay(run, out, *words), steps)
    assert contents(run) == before
    assert main(replay(run, out, *words)) == 0
    resumed = capsys.readouterr()
    assert "resuming there" in resumed.err
    assert main(replay(run, tmp_path / "whole", *words)) == 0
    assert json.loads(resumed.out) | {"out": ""} == printed_json(capsys) | {"out": ""}
    assert own_hashes(out) == own_hashes(tmp_path / "whole")
    lines = [(p / "metrics" / "trainer.jsonl").read_text() for p in (out, tmp_path / "whole")]
    shown = [[json.loads(line)["step"] for line in text.splitlines()] for text in lines]
    assert shown[0] == shown[1]


def test_another_wish_in_the_same_folder_is_refused_with_the_difference(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(replay(run, out, "--from-step", "5")) == 0
    done = capsys.readouterr().out
    assert main(replay(run, out, "--from-step", "5", "--where", "tokens<9")) == 2
    assert 'where: [] there, ["tokens<9"] asked for' in capsys.readouterr().err
    assert main(replay(run, out, "--from-step", "4")) == 2
    assert "from_step: 5 there, 4 asked for" in capsys.readouterr().err
    assert main(replay(run, out, "--from-step", "5")) == 0, "completed steps are printed again"
    assert capsys.readouterr().out == done
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert main(replay(run, tmp_path / "full", "--from-step", "5")) == 2
    assert "holds no replay" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "skipped"),
    [("lag<0", 1.0), ("step<5", 1.0), ("time<2020-01-01", 1.0), ("lag>=0", 0.0), ("step>=5", 0.0)],
)
def test_lag_step_and_time_choose_trajectories(where, skipped, run, tmp_path, capsys):
    assert main(replay(run, tmp_path / "out", "--from-step", "5", "--where", where)) == 0
    (line, last) = (tmp_path / "out" / "metrics" / "trainer.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 5, "before its step an experiment is the run itself"
    assert json.loads(last)["updates_skipped"] == skipped


def test_a_replay_is_no_run(run: Path, tmp_path: Path, capsys):
    out = tmp_path / "out"
    assert main(replay(run, out, "--from-step", "5")) == 0
    assert main(["audit", str(out)]) == 2
    assert main(["train", str(out / "config.json")]) == 2
    assert main(replay(run, run / "inside", "--from-step", "5")) == 2
    assert not (run / "inside").exists()
