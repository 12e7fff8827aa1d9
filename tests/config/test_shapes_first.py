"""Defaults of policies and presets follow the lengths and the adapter that fit the model."""

from argparse import Namespace
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.tasks.dataset_survey import DatasetSurvey, LongPrompt
from rollstream.run.checks.fitting import fit_data, with_settings
from rollstream.run.checks.task import TaskAnswer, task_findings
from rollstream.run.checks.task_facts import TaskFacts
from rollstream.run.cli.configuration import load_configuration
from rollstream.run.config.config import load, load_layers, validate_layers
from rollstream.run.config.fitted_defaults import put_recorded_defaults, set_settings
from rollstream.run.config.policy_defaults import follow_length
from rollstream.run.config.recorded_configuration import record_configuration
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import SettingLayers
from rollstream.storage.identity import read_or_create_identity
from rollstream.storage.stores.connect import open_store


def layers(*settings: str, environment: dict[str, str] | None = None) -> SettingLayers:
    return load_layers(None, settings, environment or {})


def configured(*settings: str, environment: dict[str, str] | None = None) -> Configuration:
    return validate_layers(layers(*settings, environment=environment))


@pytest.mark.parametrize(
    ("preset", "setting", "value"),
    [("dapo", "overlong_penalty", (164, 204)), ("dr_grpo", "aggregate_tokens", 204)],
)
def test_a_preset_follows_the_answers_that_fit(preset: str, setting: str, value: object) -> None:
    c = configured(f"trainer.preset={preset}", "rollouts.context_max=256")
    assert c.sampling.tokens_max == 204
    assert getattr(c.trainer, setting) == value


def facts(longest: int) -> TaskFacts:
    survey = DatasetSurvey("a", 10, True, 10, 0, 0, False, 0, [], [], "null", 0)
    return TaskFacts(surveys=[survey], longest=[LongPrompt(longest, "line 1")])


def test_a_preset_follows_the_answers_that_fit_the_data() -> None:
    given = layers("trainer.preset=dapo", "model.config.max_position_embeddings=512")
    c, lines = fit_data(validate_layers(given), facts(200), set_settings(given))
    assert c.sampling.tokens_max == 312
    assert c.trainer.overlong_penalty == (250, 312)
    assert any("overlong_penalty" in line for line in lines)
    recorded = layers("sampling.tokens_max=312")
    put_recorded_defaults(given, recorded)
    follow_length(given)
    assert validate_layers(given).trainer.overlong_penalty == (250, 312)


def test_a_context_has_room_for_the_answers_of_an_evaluation() -> None:
    held_out = LongPrompt(604, "line 1", is_held_out=True)
    found = TaskFacts(surveys=facts(0).surveys, longest=[held_out], held_out=5)
    given = layers("evaluation.tokens_max=2000")
    c, lines = fit_data(validate_layers(given), found, set_settings(given))
    assert c.rollouts.context_max == 2624
    assert "evaluation.tokens_max" in lines[0]
    given = layers("evaluation.tokens_max=2000", "rollouts.context_max=2100")
    c, _ = fit_data(validate_layers(given), found, set_settings(given))
    shown = [f.text for f in task_findings(c, TaskAnswer(found, [""])) if f.verdict == "warning"]
    assert any("an answer has 2604 tokens, and is cut" in text for text in shown)


def test_a_long_prompt_makes_no_answer_longer() -> None:
    given = layers("model.config.max_position_embeddings=1024")
    c, _ = fit_data(validate_layers(given), facts(701), set_settings(given))
    assert (c.rollouts.context_max, c.sampling.tokens_max) == (1024, 420)


def test_a_long_prompt_makes_no_context_longer_than_the_window_of_the_model() -> None:
    given = layers("model.config.sliding_window=512")
    c, _ = fit_data(validate_layers(given), facts(159), set_settings(given))
    assert (c.rollouts.context_max, c.sampling.tokens_max) == (512, 353)


def test_the_rank_of_a_given_adapter_decides_defaults(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        '{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}'
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    keep = "rollouts.on_update=keep_version"
    given = configured(keep, f"model.lora.path={tmp_path}", "model.path=unread")
    ranked = configured(keep, "model.lora.rank=4", "model.path=unread")
    assert (given.dispatch.repack, given.rollouts.quota) == (ranked.dispatch.repack, None)


def test_another_host_takes_the_defaults_that_the_run_fitted_to_its_data(tmp_path: Path) -> None:
    file, store = tmp_path / "run.toml", f"file:{tmp_path}/store"
    file.write_text(f'run = "a"\nstore = "{store}"\n')
    host = Namespace(
        command="rollout", configuration=str(file), overrides=[], seed=None, run=str(tmp_path / "b")
    )
    assert load_configuration(host)[0].rollouts.context_max == 512
    opened = open_store(store)
    read_or_create_identity(opened, "a")
    fitted = {"rollouts.context_max": 768, "task.template": "plain"}
    record_configuration(opened, with_settings(load(file, (), {}), fitted))
    c, _ = load_configuration(host)
    assert (c.rollouts.context_max, c.task.template) == (768, "plain")
    host.overrides = ["rollouts.context_max=640"]
    assert load_configuration(host)[0].rollouts.context_max == 640


def test_variables_of_a_service_are_no_settings() -> None:
    foreign = {
        "ROLLSTREAM_SERVICE_HOST": "10.0.0.1",
        "ROLLSTREAM_SERVICE_PORT_HTTP": "80",
        "ROLLSTREAM_PORT": "tcp://10.0.0.1:80",
        "ROLLSTREAM_PORT_80_TCP_ADDR": "10.0.0.1",
        "ROLLSTREAM_EXPLORER_SERVICE_HOST": "10.0.0.1",
    }
    assert configured(environment=foreign) == configured()
    assert configured(environment={"ROLLSTREAM_RELAY__PORT": "7470"}).relay.port == 7470
    with pytest.raises(ConfigurationError, match="trainer_lr"):
        configured(environment={"ROLLSTREAM_TRAINER_LR": "1"})


def test_json_of_another_name_is_a_configuration_like_toml(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"code_revision": "x", "trainer": {"lr": 0.5}}')
    (tmp_path / "mine.toml").write_text("trainer = { lr = 0.5 }")
    mine = load(tmp_path / "mine.json", ["seed=3"], {"ROLLSTREAM_RUN": "named"})
    assert mine == load(tmp_path / "mine.toml", ["seed=3"], {"ROLLSTREAM_RUN": "named"})
    assert (mine.folder, mine.run) == (None, "named")


def test_a_home_folder_is_expanded_and_an_empty_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollstream.run.config.run_folder import folder_of_run, store_url

    monkeypatch.setenv("HOME", str(tmp_path))
    c = configured("folder=~/runs/x", "store=file:~/store")
    assert folder_of_run(c).path == tmp_path / "runs" / "x"
    assert store_url(c, tmp_path / "runs" / "x") == f"file:{tmp_path}/store"
    with pytest.raises(ConfigurationError, match="must not be empty"):
        configured("folder=")


def test_temperatures_that_an_engine_does_not_sample_at_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"temperature must lie in \[0\.01, 2\] .*vllm"):
        configured("rollouts.engine=vllm", "evaluation.temperature=5")
    assert configured("evaluation.temperature=5").evaluation.temperature == 5


def test_lists_of_numbers_are_arguments_of_the_engine() -> None:
    c = configured("rollouts.engine=vllm", "rollouts.vllm.args.cudagraph_capture_sizes=[1, 2]")
    assert c.rollouts.vllm.args == {"cudagraph_capture_sizes": [1, 2]}
