"""Scorers in the configuration: their processes, the settings that may change between two starts,
and refused settings.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.scoring.build import check_service
from rollstream.producers.settings import JudgeSettings, ScoringSettings, TaskSettings
from rollstream.producers.tasks.dataset import Dataset, DatasetOptions
from rollstream.producers.tasks.registry import load_task
from rollstream.producers.tasks.text import TaskText
from rollstream.run.checks.own_parts import check_own_parts
from rollstream.run.checks.task import TaskAnswer, task_findings
from rollstream.run.checks.task_facts import OwnParts, TaskOrder
from rollstream.run.checks.task_process import judged_facts, task_facts
from rollstream.run.config.config import load_layers, validate_layers
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.settings import Configuration
from rollstream.run.supervisor.plan import process_specs
from testbed.repository import EXAMPLES


def load(path: Path | None, overrides: Sequence[str]) -> Configuration:
    return validate_layers(load_layers(path, overrides, {}))


EXAMPLE = EXAMPLES / "late-reward.toml"


def seats(*overrides: str) -> dict[str, list[str]]:
    configuration = load(EXAMPLE, overrides)
    return {s.name: list(s.command) for s in process_specs(configuration, RunFolder(Path("run")))}


def test_the_supervisor_starts_as_many_scorers_as_are_asked_for():
    assert [name for name in seats("scoring.count=2") if "scorer" in name] == [
        "scorer-0", "scorer-1"
    ]  # fmt: skip
    assert "score" in seats()["scorer-0"]
    assert not [name for name in seats("scoring.count=0") if "scorer" in name]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scoring.names=[]", "scoring.names in --set"),
        ("task.reward=sometime", "reward must be one of 'inline' or 'late', got 'sometime'"),
        ("trainer.reward_terms.quality=much", "quality must be a number, got 'much'"),
        ("scoring.cuont=1", "nearest known: scoring.count"),
    ],
)
def test_a_mistake_is_named(override: str, message: str):
    with pytest.raises(ConfigurationError) as caught:
        load(EXAMPLE, [override])
    assert message in str(caught.value)


def test_a_scorer_without_its_function_refuses_to_start(tmp_path: Path):
    """Exit 2 ends a supervised run with the message; the role is not restarted forever."""
    line = [sys.executable, "-m", "rollstream", "score", str(EXAMPLE), "--run", str(tmp_path)]
    line += ["--set", "scoring.function=examples.brevity:scor"]
    done = subprocess.run(line, cwd=EXAMPLE.parent.parent, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no callable 'scor'; did you mean 'score'?" in done.stderr


SCORED = ["task.name=dataset", "task.options.path=x", "task.reward=late"]


def test_a_task_whose_rewards_come_from_elsewhere_needs_no_verifier():
    judged = [*SCORED, "scoring.function=judge"]
    assert not load(None, judged).evaluation.enabled
    for settings, message in (
        ([*judged, "evaluation.enabled=true"], "which an evaluation calls"),
        (SCORED, "must have a verifier"),
        (["task.name=dataset", "task.options.path=x"], "must have a verifier"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            load(None, settings)
    own = [*judged, "task.options.verifier=a:b"]
    assert load(None, own).evaluation.enabled


@pytest.mark.parametrize(
    ("function", "names", "text"),
    [
        ("lone", ("reward",), "reward 2.5 for a made-up answer"),
        ("paired", ("reward",), "the result is a tuple, not a number"),
        ("misbehaves", ("reward", "quality"), "reward (scoring.names) is not among"),
    ],
)
def test_a_check_calls_the_function_of_a_scorer_once(
    tmp_path: Path, function: str, names: tuple[str, ...], text: str
):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "reference": "b"}))
    options = DatasetOptions(str(tmp_path / "a.jsonl"), held_out_share=0)
    task: Any = Dataset(TaskText(TextTokenizer(None)), options)
    parts = OwnParts(scoring=f"tests.scoring.odd_scorers:{function}", scoring_names=names)
    order = TaskOrder(0, None, None, False, False, True, parts=parts)
    facts = task_facts(task, order)
    judged = list(judged_facts(task, order, facts))
    settings = [*SCORED, f"scoring.function={parts.scoring}"]
    found = {f.subject: f for f in task_findings(load(None, settings), TaskAnswer(facts, judged))}
    assert text in found["scorer"].text
    assert (found["scorer"].verdict == "ok") == (function == "lone")
    assert "none: scoring.function gives the rewards" in found["verifier"].text


def test_a_function_that_is_asynchronous_is_refused():
    parts = OwnParts(scoring="tests.scoring.odd_scorers:later")
    with pytest.raises(ConfigurationError, match="is an `async def`"):
        check_own_parts(parts, load_task(TaskSettings(name="remainder")))


def test_placeholders_of_other_tools_in_a_judges_prompt_are_refused():
    judge = JudgeSettings(model="m", prompt="{question} {answer} Score: {number}")
    scoring = ScoringSettings(function="judge", judge=judge)
    with pytest.raises(ConfigurationError, match=r"has {question}.*write {prompt}"):
        check_service(scoring, None)
