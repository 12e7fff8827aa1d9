"""docs/tutorial/own-reward.md and README: their files work as printed."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rollstream.run.config.config import validate_layers
from rollstream.run.config.sources import file_layer

PAGE = Path(__file__).parents[2] / "docs" / "tutorial" / "own-reward.md"
BLOCK = re.compile(r"```(?:python|toml)\n# ([\w.]+)\n(.*?)```", re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of the page, its prompts made."""
    for name, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "make_prompts.py"], cwd=tmp_path, check=True)
    return tmp_path


def test_the_files_fit_together(folder: Path) -> None:
    settings = tomllib.loads((folder / "letters.toml").read_text(encoding="utf-8"))
    validate_layers(file_layer(folder / "letters.toml"))
    options = settings["task"]["options"]
    lines = [json.loads(one) for one in (folder / options["path"]).read_text().splitlines()]
    assert len(lines) == 2000
    assert {options["prompt"], options["reference"], options["answer"]} <= lines[0].keys()
    module, _, function = options["verifier"].partition(":")
    names: dict[str, object] = {}
    exec((folder / f"{module}.py").read_text(encoding="utf-8"), names)
    reward = names[function]
    assert callable(reward)
    assert reward("abcde", "ecadb") == (1.0, {"solved": 1.0})
    assert reward("abced", "ecadb") == (0.6, {"solved": 0.0})


def test_the_files_of_the_readme_fit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (PAGE.parents[2] / "README.md").read_text(encoding="utf-8")
    reward, run = re.findall(r"```(?:python|toml)\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_run.toml").write_text(run, encoding="utf-8")
    model = tmp_path / tomllib.loads(run)["model"]["path"]
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    validate_layers(file_layer(tmp_path / "my_run.toml"))
    names: dict[str, object] = {}
    exec(reward, names)
    module, _, function = tomllib.loads(run)["task"]["options"]["verifier"].partition(":")
    assert f"# {module}.py" in reward
    contains = names[function]
    assert callable(contains)
    assert contains("it is 4", "4") == 1.0


@pytest.mark.slow
def test_a_check_prints_what_the_page_shows(folder: Path) -> None:
    (shown,) = re.findall(r"```text\n(✓ model.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown in _rollstream(folder, "check", "letters.toml")


@pytest.mark.slow
def test_the_run_and_its_questions(folder: Path) -> None:
    run = ["run", "letters.toml", "--set", "trainer.steps=6", "--set", "warmup.steps=20"]
    fast = ["--set", "evaluation.enabled=false", "--set", "checkpoints.every=2"]
    _rollstream(folder, *run, *fast)
    questions = re.findall(r'^rollstream query "(.*)" --run', PAGE.read_text(), re.MULTILINE)
    assert len(questions) == 2
    for question in questions:
        assert "\t" in _rollstream(folder, "query", question, "--run", "runs/letters")
    assert "trained" in _rollstream(folder, "inspect", "--last", "runs/letters")
    advantage = ["--set", "trainer.advantage=centred", "--out", "runs/centred"]
    _rollstream(folder, "replay", "runs/letters", "--from-step", "4", *advantage)


def _rollstream(folder: Path, *arguments: str) -> str:
    line = [sys.executable, "-m", "rollstream", *arguments]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
