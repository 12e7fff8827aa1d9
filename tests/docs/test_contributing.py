"""The steps of CONTRIBUTING.md: at most five for each part; every file and every name that they
give exists, and those for a reward and a task work in an empty folder. The other ones are followed
in `test_contributing_copies.py`.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from textwrap import dedent

import pytest

from rollstream.producers.tasks.base import Task
from rollstream.producers.tasks.registry import load_task
from rollstream.run.config.config import validate_layers
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import file_layer
from testbed.repository import ROOT
from testbed.waiting import WAIT_S

SMALL = {
    "TRAINER__STEPS": "2", "TRAINER__GROUPS_PER_STEP": "1", "TRAINER__SAMPLES_PER_GROUP": "2",
    "TRAINER__WORKERS": "1", "SAMPLING__TOKENS_MAX": "8", "ROLLOUTS__COUNT": "1",
    "ROLLOUTS__SLOTS": "8", "WARMUP__STEPS": "2", "WARMUP__DOCUMENTS": "10",
    "EVALUATION__ENABLED": "false",
}  # fmt: skip
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PARTS = dict(re.findall(r"^## (Add .*)\n((?:(?!^## ).*\n)*)", TEXT, re.MULTILINE))
BLOCK = re.compile(r"^   ```(?:python|toml)\n((?:(?!   ```).*\n)*)   ```$", re.MULTILINE)
PATH = re.compile(r"`((?:\w+/)+(?:\w+\.py)?)`")


@pytest.mark.parametrize(
    "part",
    [
        "command",
        "reward",
        "task",
        "engine",
        "object store",
        "turn driver",
        "assignment policy",
        "loss",
        "role",
    ],
)
def test_a_part_has_at_most_five_steps(part: str) -> None:
    (steps,) = (text for title, text in PARTS.items() if title.endswith(f" {part}"))
    numbers = [int(one) for one in re.findall(r"^(\d)\. ", steps, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 1 <= len(numbers) <= 5


def test_each_file_that_a_step_names_exists() -> None:
    named = set(PATH.findall(TEXT))
    assert len(named) > 20
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_each_name_of_a_file_is_defined_there() -> None:
    named = re.findall(r"`(\w+)` of `((?:\w+/)+\w+\.py)`", TEXT)
    assert len(named) >= 8
    defined = r"^(?:def |class ){0}\b|^{0}(?::.*)? = "
    files = {(name, path): (ROOT / path).read_text(encoding="utf-8") for name, path in named}
    missing = [
        f"{path}: {name}"
        for (name, path), text in files.items()
        if not re.search(defined.format(re.escape(name)), text, re.MULTILINE)
    ]
    assert missing == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the printed files, which is the working directory."""
    for block in BLOCK.findall(TEXT):
        first, _, rest = dedent(block).partition("\n")
        (tmp_path / first.removeprefix("# ")).write_text(rest, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("word_reward", "sums"):
        sys.modules.pop(module, None)
    return tmp_path


def _task(file: str) -> Task:
    configuration: Configuration = validate_layers(file_layer(Path(file)))
    assert tomllib.loads(Path(file).read_text())["task"]["name"] == configuration.task.name
    return load_task(configuration.task)


def _write_prompts(folder: Path) -> None:
    rows = [{"question": f"Say {word}.", "answer": word} for word in ("one", "two", "three") * 20]
    lines = (
        json.dumps({**row, "question": f"{n} {row['question']}"}) for n, row in enumerate(rows)
    )
    (folder / "words.jsonl").write_text("\n".join(lines))


def test_the_steps_for_a_reward(folder: Path) -> None:
    _write_prompts(folder)
    task = _task("word_run.toml")
    prompt = task.prompt(0, 0)
    word = json.loads(prompt.reference)
    answer = task.tokenizer().encode(f"it is {word}")
    score = task.judge(prompt.reference, [answer])
    assert (score.reward, score.scores) == (1.0, {"length": float(len(f"it is {word}"))})
    assert task.judge(prompt.reference, [task.tokenizer().encode("no")]).reward == 0.0


def test_the_steps_for_a_task(folder: Path) -> None:
    task = _task("sums_run.toml")
    prompts = [task.prompt(1, position) for position in range(81)]
    assert prompts == [task.prompt(1, position) for position in range(81)]
    assert not {one.tokens for one in prompts} & {one.tokens for one in task.held_out(9)}
    right = task.tokenizer().encode(prompts[0].reference)
    assert task.judge(prompts[0].reference, [right]).reward == 1.0
    assert task.judge(prompts[0].reference, [task.tokenizer().encode("x")]).reward == 0.0


@pytest.mark.slow
def test_both_run(folder: Path) -> None:
    """The task runs on the model that the warm-up of the first run made."""
    _write_prompts(folder)
    _run(folder, "word_run.toml", "--run", "runs/words")
    _run(folder, "sums_run.toml", "--run", "runs/sums", "--set", "model.path=runs/words/model")


def _run(folder: Path, *words: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {f"ROLLSTREAM_{key}": value for key, value in SMALL.items()}
    command = [sys.executable, "-m", "rollstream", "run", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
