"""`rollstream replay … --offline`: training on trajectories alone, of archives and JSON lines."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from rollstream.keep.replay.offline_plan import index_log
from rollstream.keep.replay.recorded_steps import read_recorded
from rollstream.run.cli.main import main
from rollstream.streams.connect import open_bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Trajectory
from testbed.run_process import read
from tests.replay.test_replay_of_runs import killed, own_hashes
from tests.support.kept_run import made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("run"), archive=True)


def offline(run: Path, out: Path, *words: object) -> list[str]:
    config = ["--offline", str(run / "config.json"), "--out", str(out), "--json"]
    return ["replay", *map(str, words), *config]


def printed_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def lines(path: Path, *values: dict | str) -> Path:
    path.write_text("".join(f"{v if isinstance(v, str) else json.dumps(v)}\n" for v in values))
    return path


def groups(count: int, **more: object) -> list[dict]:
    """Two samples each, of which one is correct."""
    return [
        {"prompt": [1, 2, n], "completion": [3, 4 + right], "reward": right, **more}
        for n in range(count)
        for right in (0, 1)
    ]


def gathered(out: Path) -> list:
    bus = open_bus(f"sqlite:{out / 'bus'}")
    reader = TopicReader(bus, "trajectories", from_begin(bus, "trajectories"))
    found = [received.record for received in reader.read_to(bus.end("trajectories"))]
    bus.close()
    return found


def test_trajectories_of_two_runs_are_trained_group_by_group(run: Path, tmp_path: Path, capsys):
    shutil.copytree(run / "store" / "archive", tmp_path / "kept" / "archive")
    out = tmp_path / "out"
    assert main(offline(run, out, run, tmp_path / "kept", "--set", "trainer.steps=99")) == 0
    found = printed_json(capsys)
    records = gathered(out)
    assert len(records) == found["gathered"]["trajectories"]
    assert len({record.trajectory for record in records}) == len(records)
    assert {record.trajectory.split("/")[0] for record in records} == {run.name, "kept"}
    per_step = json.loads((out / "config.json").read_text())["trainer"]["groups_per_step"]
    assert (
        found["steps"] * per_step + found["closed"] + found["left_over"]
        == (found["gathered"]["groups"])
    )
    assert sorted(own_hashes(out)) == list(range(1, found["steps"] + 1))
    written = [json.loads(line) for line in (out / "metrics" / "trainer.jsonl").open()]
    assert written[0]["ratio_mean"] == pytest.approx(1, abs=1e-3), "the model that sampled them"
    assert any(line["gradient_norm"] for line in written)
    assert (out / "report.html").is_file()
    assert main(["weights", "verify", str(out)]) == 0
    assert main(["train", str(out / "config.json")]) == 2, "it is no run"


def test_a_killed_one_resumes_to_the_same_hashes(run: Path, tmp_path: Path, capsys):
    words = (run, "--set", "trainer.steps=6", "--set", "trainer.groups_per_step=1")
    killed(offline(run, tmp_path / "out", *words), 3)
    assert main(offline(run, tmp_path / "out", *words)) == 0
    assert printed_json(capsys)["steps"] == 6
    assert main(offline(run, tmp_path / "whole", *words)) == 0
    assert own_hashes(tmp_path / "out") == own_hashes(tmp_path / "whole")
    assert main(offline(run, tmp_path / "out", *words, "--set", "trainer.lr=0.1")) == 2


def test_lines_without_logprobs_get_those_of_the_starting_model(run: Path, tmp_path, capsys):
    path = lines(tmp_path / "mine.jsonl", *groups(3))
    assert main(offline(run, tmp_path / "out", path, "--set", "trainer.groups_per_step=3")) == 0
    printed = capsys.readouterr()
    assert "6 of them had no log-probabilities" in printed.err
    assert json.loads(printed.out)["steps"] == 1
    (line,) = (tmp_path / "out" / "metrics" / "trainer.jsonl").read_text().splitlines()
    assert json.loads(line)["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert json.loads(line)["gradient_norm"] > 0
    assert all((record.logprobs < 0).all() for record in gathered(tmp_path / "out"))


def test_lines_get_the_logprobs_of_the_stored_version_that_they_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trajectories of the run as another program's file, which lost what the engine recorded."""
    recorded = {
        record.trajectory: record
        for record in read(run, "trajectories", Trajectory)
        if len(record.spans) == 1 and record.finish != "dead"
    }
    versions = {record.spans[0].version.number for record in recorded.values()}
    assert len(versions) > 1
    values = [
        {
            "trajectory": name, "group": record.group, "reward": record.reward, "run": str(run),
            "version": record.spans[0].version.number, "tokens": record.tokens.tolist(),
            "sources": record.sources.tolist(), "temperature": record.temperature,
        }
        for name, record in recorded.items()
    ]  # fmt: skip
    path = lines(tmp_path / "mine.jsonl", *values)
    assert main(offline(run, tmp_path / "out", path, "--set", "trainer.steps=1")) == 0
    assert f"{len(values)} of them had no log-probabilities: those of the versions" in (
        capsys.readouterr().err
    )
    found = gathered(tmp_path / "out")
    assert len(found) == len(values)
    for record in found:
        before = recorded[record.trajectory.removeprefix("mine/")].logprobs
        assert np.allclose(record.logprobs, before, atol=1e-4)


def test_a_version_that_is_not_stored_is_refused_before_anything_is_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one, *rest) = groups(1)
    for named, expected in (
        ({"run": str(run), "version": 99}, "version 99 of"),
        ({"run": str(tmp_path), "version": 1}, "is no run's folder"),
        ({"version": 1}, "give `run` and `version` together"),
        ({"run": str(run), "version": 1, "logprobs": [-1.0, -1.0]}, "in place of `logprobs`"),
    ):
        path = lines(tmp_path / "mine.jsonl", {**one, **named}, *rest)
        assert main(offline(run, tmp_path / "out", path)) == 2
        assert expected in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_lines_keep_their_values(run: Path, tmp_path: Path):
    """Groups by name or by prompt, several turns, log-probabilities as given."""
    turns = {"tokens": [1, 2, 3, 4, 5], "sources": [0, 0, 1, 2, 1], "logprobs": [-0.5, -1.0]}
    path = lines(
        tmp_path / "mine.jsonl", *groups(1),
        {**turns, "group": "g", "reward": 0.25, "trajectory": "a", "task": "mine"}, "",
        {"prompt": [9], "completion": [3], "group": "g", "reward": 1},
    )  # fmt: skip
    assert main(offline(run, tmp_path / "out", path, "--set", "trainer.groups_per_step=1")) == 0
    bus = open_bus(f"sqlite:{tmp_path / 'out' / 'bus'}")
    assert [len(members) for _, members in sorted(index_log(bus, ()).members.items())] == [2, 2]
    assert sorted(read_recorded(bus).done) == [1, 2]
    bus.close()
    (kept,) = [r for r in gathered(tmp_path / "out") if r.trajectory == "mine/a"]
    assert (kept.task, kept.reward, kept.logprobs.tolist()) == ("mine", 0.25, [-0.5, -1.0])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nonsense", "JSON is malformed"),
        ({"prompt": "abc", "completion": "d", "reward": 1}, "needs the model's tokenizer"),
        ({"prompt": [1], "completion": [2], "reward": 1, "logprob": []}, "field `logprob`"),
        ({"prompt": [1], "completion": [2]}, "missing required field `reward`"),
        ({"prompt": [1], "completion": [], "reward": 1}, "no generated token"),
        ({"prompt": [], "completion": [2], "reward": 1}, "at least one token must precede"),
        ({"prompt": [1], "completion": [2], "reward": 1, "logprobs": [0.5]}, "of 0.5, outside"),
        ({"prompt": [1], "completion": [2], "reward": 1, "logprobs": []}, "0 log-prob"),
        ({"prompt": [1], "completion": [-2], "reward": 1}, "`int` >= 0"),
        ({"tokens": [1, 2], "reward": 1}, "need `sources`"),
        ({"prompt": [1], "completion": [2], "reward": 1, "temperature": 0}, "temperature 0"),
        ({"prompt": [1], "completion": [2], "reward": 1, "trajectory": "line-1"}, "a second"),
    ],
)
def test_a_line_that_is_none_is_named_and_nothing_is_begun(line, expected, run, tmp_path, capsys):
    path = lines(tmp_path / "mine.jsonl", groups(1)[0], line)
    assert main(offline(run, tmp_path / "out", path)) == 2
    message = capsys.readouterr().err
    assert f"{path} line 2" in message
    assert expected in message
    assert not (tmp_path / "out").exists()


def test_lines_that_the_model_or_the_steps_cannot_use_are_reported(
    run: Path, tmp_path: Path, capsys
):
    foreign = lines(tmp_path / "foreign.jsonl", {"prompt": [1], "completion": [99], "reward": 1})
    assert main(offline(run, tmp_path / "out", foreign)) == 2
    assert "is it of another tokenizer?" in capsys.readouterr().err
    few = lines(tmp_path / "few.jsonl", *groups(1))
    assert main(offline(run, tmp_path / "out", few, "--set", "trainer.groups_per_step=2")) == 0
    assert (printed_json(capsys)["steps"], (tmp_path / "out").exists()) == (0, True)
    assert main(offline(run, tmp_path / "other", tmp_path / "none.jsonl")) == 2
    assert "no such file" in capsys.readouterr().err


def test_filters_leave_trajectories_out_before_groups_are_made(run: Path, tmp_path, capsys):
    words = ("--where", "step>=3", "--set", "trainer.groups_per_step=1")
    assert main(offline(run, tmp_path / "out", run, *words, "--where", "lag>=0")) == 0
    found = printed_json(capsys)["gathered"]
    assert 0 < found["trajectories"] < found["trajectories"] + found["filtered_out"]
    assert main(offline(run, tmp_path / "none", run, *words, "--where", "lag<0")) == 0
    assert "trajectories" not in printed_json(capsys)["gathered"]
    assert len(gathered(tmp_path / "out")) == found["trajectories"]
