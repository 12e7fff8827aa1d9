"""Every example in the help of every command, and every command of README, runs as written, on a
real run (examples of `query`, `tail` and `inspect` in `tests/analysis/`, of `audit` in
`tests/audit/`; the commands of docs/ are checked in `tests/docs/test_commands.py`). The run is the
quickstart, made small by the environment: 60 steps of one short group.
"""

import shlex
import shutil
import signal
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from rollstream.run.cli.commands import COMMANDS, command_parsers
from testbed.repository import ROOT
from testbed.servers import bubblewrap
from testbed.waiting import WAIT_S, wait_for
from tests.support.command_runs import PROGRAM, make_runs, run_command, small_environment
from tests.support.printed_commands import printed_commands

WANDB = """
class Run:
    def log(self, *_, **__): pass
    def define_metric(self, *_, **__): pass
    def finish(self, *_, **__): pass
    id, url = "1", "nowhere"
def init(**_): return Run()
"""
ONE_SHOT = (
    "check",
    "run",
    "warmup",
    "put-model",
    "plan",
    "profile",
    "tune",
    "report",
    "ls",
    "config",
    "top",
    "diff",
    "train",
    "weights",
    "checkpoints",
    "fork",
    "replay",
    "trace",
    "observe",
    "trust",
)
UNTIL_TOLD = ("prompts", "dispatch", "rollout", "score", "archive", "relay", "endpoint")
pytestmark = pytest.mark.slow  # minutes of processes


def examples(command: str) -> list[list[str]]:
    """The words after `rollstream` of each example."""
    parsers = command_parsers(command)
    return [shlex.split(line)[1:] for parser in parsers for line in parser.example_lines()]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the first example's run, under the names that other examples use."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "fake").mkdir()
    (folder / "fake" / "wandb.py").write_text(WANDB)
    (first, *_) = examples("run")
    make_runs(folder, first, ("quickstart-0", "quickstart-1"))
    return folder


@pytest.mark.parametrize("command", ONE_SHOT)
def test_examples_that_end_by_themselves(command: str, here: Path):
    found = examples(command)
    assert found
    for words in found:
        done = run_command(words, here)
        assert done.returncode == 0, (words, done.stderr)
        assert done.stdout or done.stderr, words


def test_the_commands_of_the_readme(here: Path):
    """Runs on the same run; its output gets a name of its own."""
    printed = [one.words for one in printed_commands() if one.page == "README.md"]
    found = [words[1:] for words in printed if words[0] == "rollstream"]
    assert found
    for words in found:
        own = [
            word.replace("runs/", "runs/readme-") if before == "--out" else word
            for before, word in pairwise(("", *words))
        ]
        done = run_command(own, here)
        assert done.returncode == 0, (own, done.stderr)


def test_examples_of_rm(here: Path, tmp_path: Path):
    """On a copy, one after the other; without an answer nothing is deleted."""
    shutil.copytree(here / "runs" / "quickstart-0", tmp_path / "runs" / "quickstart-0")
    assert run_command(["rm", "quickstart-0"], tmp_path).returncode == 130
    for words in examples("rm"):
        done = run_command(words, tmp_path)
        assert done.returncode == 0, (words, done.stderr)
    assert list((tmp_path / "runs").iterdir()) == []


def test_examples_of_backup_and_restore(here: Path):
    """What one backs up the other restores, in this order."""
    for words in (*examples("backup"), *examples("restore")):
        done = run_command(words, here)
        assert done.returncode == 0, (words, done.stderr)
        assert done.stdout, words


def test_examples_of_explore(here: Path):
    """One exports and ends; the others print their URL and serve until they are stopped."""
    for words in examples("explore"):
        if "--export" in words:
            assert run_command(words, here).returncode == 0
            continue
        environment = small_environment(BROWSER="true")
        with subprocess.Popen(
            [*PROGRAM, *words], cwd=here, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("explorer: http://127.0.0.1:")
            process.terminate()
            assert process.wait(WAIT_S) == 0


def test_examples_of_evaluation(here: Path):
    following, stored = examples("eval")
    assert run_command(following, here).returncode == 0
    done = run_command(stored, here)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.parametrize("command", UNTIL_TOLD)
def test_a_role_by_itself_runs_until_it_is_stopped(command: str, here: Path):
    for words in examples(command):
        name = words[words.index("--name") + 1] if "--name" in words else command
        _runs_until_stopped(words, name, 0 if "--preemptible" in words else 143, here)


def _runs_until_stopped(words: list[str], name: str, code: int, here: Path) -> None:
    log = here / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*PROGRAM, *words], cwd=here, env=small_environment(), stdout=output, stderr=output
        )
        try:
            wait_for(lambda: _state(here, name) == "running", process, log.read_text)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == code, log.read_text()
        finally:
            process.kill()
            process.wait()


def _state(here: Path, name: str) -> str:
    """The answer of the process on its health port."""
    import json
    import urllib.request

    try:
        endpoint = here / "runs" / "quickstart-0" / "metrics" / "endpoints" / f"{name}.json"
        port = json.loads(endpoint.read_text())["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return json.loads(answer.read())["state"]
    except OSError:
        return ""


def test_examples_of_forwarding(here: Path):
    once, following = examples("forward")
    assert run_command(once, here).returncode == 0
    log = here / "forward.log"
    with log.open("wb") as output:
        environment = small_environment(PYTHONPATH=f"{here / 'fake'}:{ROOT}")
        process = subprocess.Popen(
            [*PROGRAM, *following], cwd=here, env=environment, stdout=output, stderr=output
        )
        try:
            done = here / "runs" / "quickstart-0" / "metrics" / "forward-wandb.json"
            wait_for(done.exists, process, log.read_text)
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) in (0, 130), log.read_text()
        finally:
            process.kill()
            process.wait()


def test_the_example_of_health(here: Path):
    """A process that listens on the port of the example answers; a sandbox can be made here."""
    bubblewrap.program()
    words, sandbox = examples("health")
    done = run_command(sandbox, here)
    assert done.returncode == 0, done.stderr
    assert "memory" in done.stdout
    log = here / "asked.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*PROGRAM, "prompts", "runs/quickstart-1/config.json"],
            cwd=here,
            env=small_environment(ROLLSTREAM_METRICS_PORT=words[-1]),
            stdout=output,
            stderr=output,
        )
        try:
            wait_for(lambda: run_command(words, here).returncode == 0, process, log.read_text)
        finally:
            process.kill()
            process.wait()
    assert run_command(words, here).returncode == 1


def test_every_command_has_examples_that_some_test_runs():
    known = {*ONE_SHOT, *UNTIL_TOLD, "eval", "forward", "health", "query", "tail", "inspect"} | {
        "backup",
        "restore",
        "rm",
        "audit",
        "simulate",
        "explore",
    }
    assert set(COMMANDS) == known
