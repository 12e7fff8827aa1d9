"""`rollstream forward`: every line once at its step, resumed after a stop, also behind lines cut
off by a kill.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollstream.errors import CorruptObject
from rollstream.run.cli.main import parse
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration
from rollstream.run.metrics.forwarder import (
    READ_BYTES_MAX,
    FilePosition,
    Forwarder,
    TensorBoardSink,
    read_lines,
)
from rollstream.storage.metrics_file import MetricsFile
from testbed.repository import ROOT
from testbed.waiting import WAIT_S, wait_for

FAKE_WANDB = """
import json, os
class Run:
    url = None
    def _note(self, **call):
        with open(os.environ["CALLS"], "a") as calls:
            calls.write(json.dumps(call) + "\\\\n")
    def define_metric(self, name, step_metric=None):
        self._note(define=name, by=step_metric)
    def log(self, values):
        self._note(log=values)
    def finish(self):
        self._note(finish=True)
def init(**given):
    run = Run()
    run._note(init=given)
    return run
""".replace("\\\\", "\\")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A configured run whose trainer wrote two steps and whose evaluation wrote one line."""
    folder = RunFolder(tmp_path / "run")
    write_configuration(folder, Configuration(run="tiny", folder=str(folder.path)))
    write(folder, "trainer", {"step": 1, "time_s": 10.0, "loss": 0.5}, {"step": 2, "loss": 0.25})
    write(folder, "eval", {"step": 2, "accuracy_sampled": 0.75, "shares": {"long": 0.5}})
    return folder


def write(folder: RunFolder, name: str, *lines: dict) -> None:
    with MetricsFile(folder.metrics / f"{name}.jsonl") as metrics:
        for line in lines:
            metrics.append(line)


def forward(folder: RunFolder, to: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "rollstream", "forward", str(folder.path), "--to", to, "--json"]
    given = {**os.environ, **environment}
    return subprocess.run(line, cwd=ROOT, env=given, capture_output=True, text=True, timeout=WAIT_S)


def scalars(folder: RunFolder) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(
        str(folder.metrics / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}
    )
    events.Reload()
    tags = events.Tags()["tensors"]
    return {
        t: [(e.step, float(e.tensor_proto.float_val[0])) for e in events.Tensors(t)] for t in tags
    }


def test_tensorboard_reads_back_every_figure_at_its_step(folder):
    done = forward(folder, "tensorboard")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["lines"] == 3
    assert scalars(folder) == {
        "trainer/loss": [(1, 0.5), (2, 0.25)],
        "eval/accuracy_sampled": [(2, 0.75)],
        "eval/shares/long": [(2, 0.5)],
    }


def test_a_second_start_forwards_only_what_is_new_and_a_torn_line_waits(folder):
    forward(folder, "tensorboard")
    with (folder.metrics / "trainer.jsonl").open("a") as file:
        file.write('{"step": 3, "loss"')
    assert json.loads(forward(folder, "tensorboard").stdout)["lines"] == 0
    with (folder.metrics / "trainer.jsonl").open("a") as file:
        file.write(": 0.125}\n")
    assert json.loads(forward(folder, "tensorboard").stdout)["lines"] == 1
    assert scalars(folder)["trainer/loss"] == [(1, 0.5), (2, 0.25), (3, 0.125)]


@pytest.fixture
def wandb(tmp_path: Path) -> dict[str, str]:
    """A module of that name that records its calls."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(FAKE_WANDB)
    return {"PYTHONPATH": str(tmp_path / "modules"), "CALLS": str(tmp_path / "calls.jsonl")}


def calls(wandb: dict[str, str], kind: str) -> list:
    lines = Path(wandb["CALLS"]).read_text().splitlines()
    return [call[kind] for call in map(json.loads, lines) if kind in call]


def test_wandb_gets_each_series_against_its_own_step(folder, wandb):
    done = forward(folder, "wandb", **wandb)
    assert done.returncode == 0, done.stderr
    assert {"trainer/loss": 0.5, "trainer/step": 1} in calls(wandb, "log")
    assert {
        "eval/accuracy_sampled": 0.75, "eval/shares/long": 0.5, "eval/step": 2
    } in calls(wandb, "log")  # fmt: skip
    assert "trainer/*" in calls(wandb, "define")
    assert calls(wandb, "finish") == [True]


def test_a_later_start_continues_the_same_wandb_run(folder, wandb):
    forward(folder, "wandb", **wandb)
    write(folder, "trainer", {"step": 3, "loss": 0.125})
    forward(folder, "wandb", **wandb)
    first, second = calls(wandb, "init")
    assert first["id"] == second["id"]
    assert second["resume"] == "allow"
    assert calls(wandb, "log")[-1] == {"trainer/loss": 0.125, "trainer/step": 3}
    assert len(calls(wandb, "log")) == 4


def test_settings_are_forwarded_without_the_addresses_of_log_and_store(folder, wandb):
    forward(folder, "wandb", **wandb)
    forwarded = calls(wandb, "init")[0]["config"]
    assert forwarded["trainer.steps"] == 60
    assert not {"bus", "store"} & set(forwarded)


def test_without_the_library_the_extra_is_named(folder, tmp_path):
    (tmp_path / "empty" / "wandb").mkdir(parents=True)  # like wandb's own folder of offline runs
    done = forward(folder, "wandb", PYTHONPATH=str(tmp_path / "empty"))
    assert done.returncode == 2
    assert "pip install 'rollstream[wandb]'" in done.stderr


def test_a_line_that_is_no_json_is_named_and_passed_over(folder):
    with (folder.metrics / "trainer.jsonl").open("a") as file:
        file.write('rubbish\n{"step": 3, "loss": 0.125}\n')
    done = forward(folder, "tensorboard")
    assert done.returncode == 0
    assert "trainer.jsonl, line 3 is not a JSON object" in done.stderr
    assert scalars(folder)["trainer/loss"][-1] == (3, 0.125)


def test_a_folder_that_holds_another_run_now_is_refused(folder):
    forward(folder, "tensorboard")
    (folder.metrics / "trainer.jsonl").write_text('{"step": 1, "loss": 9.0, "time_s": 11.0}\n' * 3)
    done = forward(folder, "tensorboard")
    assert done.returncode == 1
    assert "the folder holds another run" in done.stderr
    assert "forward-tensorboard.json" in done.stderr


def test_a_damaged_state_file_is_refused_with_what_to_delete(folder):
    (folder.metrics / "forward-tensorboard.json").write_text("{")
    done = forward(folder, "tensorboard")
    assert done.returncode == 2
    assert "delete it to forward everything again" in done.stderr


def test_a_folder_without_a_run_is_refused(tmp_path):
    done = forward(RunFolder(tmp_path), "tensorboard")
    assert done.returncode == 2
    assert "holds no run" in done.stderr


def test_a_file_without_line_ends_is_damaged(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"x" * (READ_BYTES_MAX + 1))
    with pytest.raises(CorruptObject, match="more than"):
        list(read_lines(tmp_path / "x.jsonl", FilePosition()))


def test_following_continues_until_it_is_stopped_and_loses_nothing_to_kill(folder):
    line = [sys.executable, "-m", "rollstream", "forward", str(folder.path)]
    line += ["--to", "tensorboard", "--follow"]
    for number, (end, code) in enumerate(((signal.SIGKILL, -9), (signal.SIGTERM, 0)), start=3):
        write(folder, "trainer", {"step": number, "loss": 0.5**number})
        process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            wait_for(lambda: number in steps_of(folder))  # noqa: B023
            process.send_signal(end)
            assert process.wait(WAIT_S) == code
        finally:
            process.kill()
            process.wait()
    assert set(scalars(folder)["trainer/loss"]) == {(n, 0.5**n) for n in (1, 2, 3, 4)}


def steps_of(folder: RunFolder) -> set[int]:
    """The training steps in TensorBoard's files."""
    if not (folder.metrics / "tensorboard").exists():
        return set()
    return {step for step, _ in scalars(folder).get("trainer/loss", [])}


def test_two_forwarders_of_one_run_are_one_too_many(folder):
    first = Forwarder(folder.metrics, "tensorboard", lambda id: TensorBoardSink(folder.metrics))
    try:
        done = forward(folder, "tensorboard")
    finally:
        first.close()
    assert done.returncode == 1
    assert "already forwards this run" in done.stderr


def test_the_help_s_examples_parse(capsys):
    with pytest.raises(SystemExit):
        parse(["forward", "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    examples = [line for line in lines if line.startswith("rollstream forward ")]
    assert len(examples) == 2
    for example in examples:
        assert parse(shlex.split(example)[1:]).command == "forward"
