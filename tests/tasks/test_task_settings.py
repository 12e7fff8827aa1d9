"""Valid settings of tasks, and the errors of all others."""

import json
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.run.config.config import load
from rollstream.run.config.run_model import task_settings
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import prompt_tokens_max

MIXED = '[task]\nname = "mixture"\n[[task.parts]]\nname = "remainder"\n'


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Configuration:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return load(path, environment={})

    return write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            MIXED + "wieght = 2",
            "unknown key task.parts[0].wieght in run.toml; nearest known: task.p",
        ),
        (MIXED + "weight = 0", "weight must be > 0, got 0 (task.parts[0].weight in run.toml)"),
        (MIXED + "weight = inf", "weight must be finite, got inf (task.parts in run.toml)"),
        (
            MIXED + "weight = 2020-01-01",
            "cannot be a date, got 2020-01-01 (task.parts in run.toml)",
        ),
        (MIXED + 'label = "a b"', "label must match"),
        (MIXED + "[[task.parts]]\nweight = 1", "task.parts[1].name is missing (in run.toml)"),
        (MIXED + "[task.options]\na = 1", 'options must be empty with task.name = "mixture"'),
        ('[task]\nname = "mixture"', 'parts must have a table for each task with task.name = "mix'),
        (
            '[[task.parts]]\nname = "remainder"',
            'parts must be given with task.name = "mixture" only',
        ),
        ('[task]\ntemplate = "chatty"', "template must be one of 'chat' or 'plain', got 'chatty'"),
        (
            '[task]\ntemplate = "plain"\nsystem = "Be brief."',
            'system must be empty with task.template = "plain"',
        ),
        (
            "[task.options]\na = [[1]]",
            "a must be a number, true or false, or text, or a list of these",
        ),
        ("[task.options]\na = {b = 1}", "got {'b': 1} (task.options.a in run.toml)"),
    ],
)
def test_a_mistake_is_reported_in_one_line(toml, text: str, message: str):
    with pytest.raises(ConfigurationError) as caught:
        toml(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_context_longer_than_the_models_is_refused(toml, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 256}))
    with pytest.raises(
        ConfigurationError, match=r"context_max must be ≤ what the model takes \(256"
    ):
        toml(f"[model]\npath = {str(tmp_path)!r}\n[rollouts]\ncontext_max = 300")


def test_the_tokenizer_is_the_models_unless_another_is_named(toml, tmp_path: Path):
    assert task_settings(toml(""), tmp_path).tokenizer == str(tmp_path / "model")
    named = toml('[task]\ntokenizer = "elsewhere"')
    assert task_settings(named, tmp_path).tokenizer == "elsewhere"


def test_a_prompt_must_leave_room_for_a_whole_answer(toml):
    assert prompt_tokens_max(toml("[rollouts]\ncontext_max = 512")) == 92
