"""`rollstream run` checks before it writes anything, and a skipped row is named everywhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.run.checks.findings import Finding
from rollstream.run.checks.process_time import ProcessTime
from rollstream.run.cli.configuration import change_findings, load_configuration
from rollstream.run.cli.main import parse
from rollstream.run.config.run_folder import write_configuration
from rollstream.storage.skipped_rows import read_skipped_rows
from rollstream.storage.stores.connect import open_store
from testbed.first_hour.checked_runs import VERIFIERS
from testbed.waiting import wait_for
from tests.support.command_runs import run_command

RUN = """
run = "small"
[model.config]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
[task]
name = "dataset"
[task.options]
path = "rows.jsonl"
answer = "reference"
verifier = "checks:right"
[warmup]
documents = 50
steps = 1
[sampling]
tokens_max = 4
[rollouts]
count = 1
[evaluation]
samples = 1
[trainer]
steps = 1
groups_per_step = 2
samples_per_group = 2
workers = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a run of 300 rows, the 200th of which is no JSON."""
    lines = [json.dumps({"prompt": f"{n}+1", "reference": str(n + 1)}) for n in range(300)]
    lines[199] = '{"prompt": "\\ud83d", "reference": "1"}'
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "checks.py").write_text(VERIFIERS)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


@pytest.mark.slow
def test_a_skipped_row_is_named_in_log_view_and_audit(folder: Path):
    words = ["run", "run.toml", "--json"]
    done = run_command(words, folder)
    assert done.returncode == 0, done.stderr
    run = folder / "runs" / "small"
    assert "rows.jsonl, line 200: prompt has half of a surrogate" in done.stderr
    assert "line 200" in (run / "logs" / "prompts.log").read_text()
    (record,) = read_skipped_rows(open_store(f"file:{run / 'store'}"))
    assert (record.rows, record.skipped) == (300, 1)
    audit = run_command(["audit", "runs/small"], folder)
    assert audit.returncode == 0, audit.stdout
    assert "1 of 300 rows of data set rows.jsonl are skipped: rows.jsonl, line 200" in audit.stdout
    top = run_command(["top", "runs/small", "--once"], folder)
    assert "1 of 300 rows of rows.jsonl are skipped" in top.stdout
    again = run_command(words, folder)  # the defaults stay what they became
    assert again.returncode == 0, again.stderr


def test_a_refused_run_leaves_no_trace(folder: Path):
    done = run_command(["run", "run.toml", "--set", "task.options.verifier=checks:one"], folder)
    assert done.returncode == 2
    assert "takes (answer)" in done.stderr
    assert not (folder / "runs").exists()


def settings_lines(*changes: str) -> list[Finding]:
    """Returns a check's lines about settings, for a run that has begun without the changes."""
    configuration, run = load_configuration(parse(["check", "run.toml"]))
    write_configuration(run, configuration)
    arguments = parse(["check", "run.toml", *changes])
    return change_findings(load_configuration(arguments)[0], run, arguments)


def test_a_check_compares_with_the_configuration_of_the_run(folder: Path, monkeypatch):
    monkeypatch.chdir(folder)
    changed = ["--set", "trainer.lr=0.5"]
    (refused,) = settings_lines(*changed)
    assert (refused.verdict, "--accept-config" in refused.text) == ("refused", True)
    (accepted,) = settings_lines(*changed, "--accept-config")
    assert accepted.verdict == "ok"
    assert "trainer.lr" in accepted.text
    assert settings_lines() == []


def test_a_setting_that_never_changes_is_refused_without_advice_to_accept_it(
    folder: Path, monkeypatch
):
    monkeypatch.chdir(folder)
    (refused,) = settings_lines("--set", "model.path=elsewhere")
    assert "model.path cannot change in a run" in refused.text
    assert "--accept-config" not in refused.text


def test_words_behind_two_dashes_are_no_options():
    assert parse(["put-model", "--json", "--", "-model", "run.toml"]).path == "-model"


def test_a_process_that_sleeps_is_late():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        clock = ProcessTime(child.pid)
        assert not clock.is_over(60)
        wait_for(lambda: clock.is_over(0.1))
    finally:
        child.kill()
        child.wait()
