"""Settings that change nothing, or that no run can have, are named before anything starts."""

from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.tasks.dataset_survey import LongPrompt
from rollstream.run.checks.idle_settings import idle_settings
from rollstream.run.checks.task import TaskAnswer, task_findings
from rollstream.run.checks.task_facts import TaskFacts
from rollstream.run.cli.configuration import recorded_settings
from rollstream.run.config.config import load, load_layers
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration


def test_a_check_names_the_system_message_that_programs_send() -> None:
    given = {"task": {"system": "Be brief."}, "evaluation": {"enabled": False}}
    agent = {"agent": {"episode": "a:b"}}
    for settings, lines in ((given, 0), (given | agent, 1)):
        c = Configuration.model_validate(settings)
        facts = TaskFacts(longest=[LongPrompt(9, "line 1")])
        findings = task_findings(c, TaskAnswer(facts, [""]))
        assert sum('task["system"]' in finding.text for finding in findings) == lines


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text("")
    return path


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["agent.front=127.0.0.1:8000"], ["agent.front", "agent.episode"]),
        (["model.config.vocab_size=4096"], ["model.config.vocab_size", "tokenizer"]),
        (["scoring.count=1"], ["scoring.count", 'task.reward = "late"']),
        (["task.reward=late", "scoring.judge.model=m"], ["scoring.judge.model"]),
        (["trainer.critic.gamma=0.9"], ["trainer.critic.gamma", "gae"]),
        (["trainer.clip_low=0.1"], ["trainer.clip_low", 'trainer.loss is not "ppo_clip"']),
        (["trainer.loss=ppo_clip", "trainer.clip_low=0.1"], []),
        (["trainer.loss=ppo_clip", "trainer.ratio_max=3"], ["trainer.ratio_max"]),
        (["trainer.loss=ppo_clip", "trainer.ratio_max=3", "trainer.proximal=every 1"], []),
        (["trainer.loss=mine:loss", "trainer.divergence_max=0.1"], []),
        (["rollouts.vllm.memory_share=0.5"], ["rollouts.vllm.memory_share"]),
        (["trainer.reward_terms.rewards=1.0"], ["rewards", "did you mean 'reward'", "600 s"]),
        (["trainer.annotations=['checked']"], ["checked", "no group is trained"]),
        (["task.reward=late", "scoring.count=1"], []),
        (["task.reward=late"], ["scoring.count = 0", "rollstream score"]),
        (["scoring.function=judge", "scoring.count=1"], ["without effect", "gives it", "judge"]),
        (["scoring.function=a:b", "scoring.count=1"], ["without effect", "gives it"]),
        (
            [
                "task.reward=late",
                "scoring.function=judge",
                "scoring.count=1",
                "scoring.names=['quality','reward']",
            ],
            ["wait for reward", "no group is trained"],
        ),
        (
            [
                "task.reward=late",
                "scoring.function=http",
                "scoring.count=1",
                "scoring.names=['quality','reward']",
            ],
            [],
        ),
        (
            [
                "scoring.function=a:b",
                "scoring.names=['x']",
                "trainer.annotations=['x']",
                "scoring.count=1",
            ],
            [],
        ),
        (["agent.service=true", "agent.front=127.0.0.1:8000", "evaluation.enabled=false"], []),
    ],
)
def test_a_setting_without_effect_has_a_note(
    run_file: Path, overrides: list[str], words: list[str]
):
    c = load(run_file, overrides)
    keys = frozenset(override.partition("=")[0] for override in overrides)
    text = " ".join(finding.text for finding in idle_settings(c, keys))
    assert all(word in text for word in words), text
    assert bool(text) == bool(words), text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("bus=redis://x", "sqlite:FOLDER or kafka://"),
        ("bus=sqlite", "sqlite:FOLDER"),
        ("bus=s3://x/y", "sqlite:FOLDER"),
        ("store=gs://bucket/run", "file:FOLDER or s3://"),
        ("store=s3://", "s3://"),
        ("trainer.steps=99999999999999999999", "must be less than 2^63"),
        ("task.parts=[{name='dataset', options={path='a'}}]", "'path': 'a'"),
    ],
)
def test_a_value_that_no_run_can_have_is_refused(run_file: Path, override: str, words: str):
    with pytest.raises(ConfigurationError) as refused:
        load(run_file, [override])
    assert words in str(refused.value)
    assert "PartSettings" not in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ROLLSTREAM_TRAINER_LR", "trainer.lr, which is ROLLSTREAM_TRAINER__LR:"),
        ("ROLLSTREAM_ROLLOUTS_CONTEXT_MAX", "ROLLSTREAM_ROLLOUTS__CONTEXT_MAX:"),
        ("ROLLSTREAM_TRAINER__CRITIC_LR", "ROLLSTREAM_TRAINER__CRITIC__LR:"),
    ],
)
def test_a_variable_with_one_underscore_for_a_dot_has_its_advice(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, variable: str, meant: str
):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigurationError, match="two underscores") as refused:
        load(run_file)
    assert meant in str(refused.value)


def test_what_a_run_recorded_is_no_setting_of_who_resumes_it(run_file: Path, tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    write_configuration(folder, load(run_file))
    for overrides, own in (([], set()), (["scoring.count=2"], {"scoring.count"})):
        layers = load_layers(folder.configuration, overrides)
        recorded = recorded_settings(layers, folder.configuration, folder)
        assert layers.origins.keys() - recorded == own
    assert not recorded_settings(load_layers(run_file, []), run_file, folder)
