"""Configuration errors name the setting, where it is set, and what to write instead."""

import json
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.run.cli.main import main
from rollstream.run.config.config import (
    essential_settings,
    fingerprint,
    flat_settings,
    load,
    setting_scope,
)
from rollstream.run.config.errors import FOREIGN_NAMES
from rollstream.run.config.policy_defaults import DECIDED_BY_PRESETS, DEFAULT_PRESET
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.run_model import missing_model
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import setting_types
from rollstream.storage.settings import ESSENTIAL, FIXED, INCIDENTAL
from testbed.repository import EXAMPLES


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def refusal(path: Path, *overrides: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as error:
        load(path, overrides, environment or {})
    return str(error.value)


def test_an_empty_file_is_the_defaults(toml):
    found = load(toml(""), (), {})
    assert found.trainer.preset == DEFAULT_PRESET
    assert found == load(toml(""), (f"trainer.preset={DEFAULT_PRESET}",), {})
    assert found.model_copy(update={"trainer": Configuration().trainer}) == Configuration()
    objective = {key.removeprefix("trainer.") for key in (*DECIDED_BY_PRESETS, "trainer.preset")}
    assert found.trainer.model_dump(exclude=objective) == Configuration().trainer.model_dump(
        exclude=objective
    )


def test_later_layers_win(toml):
    path = toml("[trainer]\nlr = 1e-3\nsteps = 7\n[rollouts]\nslots = 3")
    environment = {"ROLLSTREAM_TRAINER__LR": "2e-3", "ROLLSTREAM_TRAINER__STEPS": "8"}
    configuration = load(path, ["trainer.lr=3e-3"], environment)
    assert configuration.trainer.lr == 3e-3
    assert configuration.trainer.steps == 8
    assert configuration.rollouts.slots == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[trainer]\ngroups_per_step = 0",
            "groups_per_step must be ≥ 1, got 0 (trainer.groups_per_step in run.toml)",
        ),
        ("[trainer]\nlr = 0.0", "lr must be > 0, got 0.0 (trainer.lr in run.toml)"),
        (
            '[trainer]\nsteps = "60"',
            "steps must be a whole number, got '60' (trainer.steps in run.toml)",
        ),
        (
            '[sampling]\ntemperature = "hot"',
            "temperature must be a number, got 'hot' (sampling.temperature in run.toml)",
        ),
        (
            "[evaluation]\nenabled = 1",
            "enabled must be true or false, got 1 (evaluation.enabled in run.toml)",
        ),
        ("trainer = 3", "trainer must be a table, got 3 (trainer in run.toml)"),
        ("[trainer]\nbetas = [0.9]", "betas must have more entries, got [0.9]"),
        ("[model]\nconfig = {a = [1]}", "a must be a number, true or false, or text, got [1]"),
        (
            '[trainer]\nloss = "ppo"',
            "loss must be one of dppo, ppo_clip, truncated_is, or 'module:function' (ppo is a "
            "preset: trainer.preset = \"ppo\"), got 'ppo'",
        ),
        ("[trainer]\nlr = inf", "lr must be finite, got inf (trainer.lr in run.toml)"),
        ("run = 2001-01-01", "run cannot be a date"),
        ('run = "../etc"', "run must match"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(toml, text, message):
    assert message in refusal(toml(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainer]\nlrr = 1", "unknown key trainer.lrr in run.toml; nearest known: trainer.lr"),
        ("lr = 1", "unknown key lr in run.toml; nearest known: trainer.lr"),
        ("[trainer]\nslots = 1", "nearest known: rollouts.slots"),
        ("[trainner]\nlr = 1", "unknown key trainner in run.toml; nearest known: trainer"),
        (
            "[trainer]\nlearning_rate = 1",
            "unknown key trainer.learning_rate in run.toml; here it is trainer.lr",
        ),
        ("[trainer]\nbatch_size = 1", "trainer.groups_per_step × trainer.samples_per_group"),
        ("num_generations = 8", "here it is trainer.samples_per_group"),
        ("[algorithm]\nkl_coef = 0.1", "algorithm.kl_coef: here it is trainer.reference_kl"),
        (
            "[actor_rollout_ref.rollout]\nn = 8\ngpu_memory_utilization = 0.5",
            "rollout.gpu_memory_utilization: here it is rollouts.vllm.memory_share",
        ),
        ("[ckpt]\nmax_steps = 3", "ckpt.max_steps: here it is trainer.steps"),
        ("[weights]\nquux = 1", "unknown key weights.quux in run.toml; known there: dtype, shard"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(toml, text, message):
    assert message in refusal(toml(text))


def test_each_foreign_name_leads_to_settings_that_exist():
    known = setting_types(Configuration)
    assert not {key for key in known if key.rpartition(".")[2] in FOREIGN_NAMES}
    for ours in FOREIGN_NAMES.values():
        named = [word for word in ours.split() if "." in word and not word.startswith("(")]
        assert ours == "folder" or named
        assert set(named) - {"task.options.path"} <= known.keys()


def test_a_model_that_is_missing_has_its_download_command(toml):
    named = str(missing_model(load(toml(""), ["model.path=Qwen/Qwen9-Tiny"])))
    assert "first run `hf download Qwen/Qwen9-Tiny`" in named
    nowhere = str(missing_model(load(toml(""), ["model.path=./nowhere"])))
    assert "must be a folder with a Hugging Face checkpoint" in nowhere
    assert "hf download" not in nowhere


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.top_k=5", "top_k must be 0 when training"),
        ("sampling.top_p=0.9", "top_p must be 1 when training"),
        ("sampling.temperature=0", "temperature must be > 0 when training"),
        (
            "rollouts.context_max=512 & sampling.tokens_max=512",
            "tokens_max must be < rollouts.context_max (512)",
        ),
        (
            "trainer.groups_per_step=24 & trainer.updates_per_step=25",
            "groups_per_step must be ≥ trainer.updates_per_step (25)",
        ),
        ("trainer.samples_per_group=1", "samples_per_group must be ≥ 2"),
        (
            "trainer.samples_per_group=8 & trainer.survivors_min=9",
            "survivors_min must be ≤ trainer.samples_per_group (8)",
        ),
        ("trainer.betas=[0.9,1.0]", "betas must lie in [0, 1)"),
        ("rollouts.engine=tensorrt", "engine must be one of torch, vllm, paced"),
        (
            "dispatch.heartbeat_timeout_s=10 & rollouts.status_s=6",
            "heartbeat_timeout_s must be ≥ 4 × rollouts.status_s (6)",
        ),
        (
            "dispatch.heartbeat_timeout_s=10 & dispatch.stuck_timeout_s=3",
            "must be ≥ dispatch.heartbeat_timeout_s (10)",
        ),
        (
            "model.config.max_position_embeddings=64 & rollouts.context_max=80",
            "context_max must be ≤ model.config",
        ),
        ("warmup.enabled=false", "path must be given when warmup.enabled is false"),
        ("task.environment=['AWS_PROFILE']", "environment must not name AWS_PROFILE"),
    ],
)
def test_an_impossible_combination_is_refused(toml, override, message):
    assert message in refusal(toml(""), *override.split(" & "))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollouts.engine=paced"], "must be 'torch' or 'vllm' with model.lora.rank > 0"),
        (["rollouts.engine=vllm", "rollouts.vllm.url=http://host:8000"], "serves no adapters"),
    ],
)
def test_adapters_are_refused_where_they_are_not_served(toml, overrides, message):
    assert message in refusal(toml(""), "model.lora.rank=8", *overrides)
    assert load(toml(""), ["model.lora.rank=8", "rollouts.engine=vllm"], {}).model.lora.rank == 8


def test_adapters_are_trained_by_several_processes(toml):
    loaded = load(toml(""), ["model.lora.rank=8", "trainer.processes=2"], {})
    assert (loaded.model.lora.rank, loaded.trainer.processes) == (8, 2)


def test_a_wave_that_can_never_be_ready_is_refused(toml):
    text = "[trainer]\ngroups_per_step = 24\n[dispatch]\nmax_lag = 'null'\nready_groups_max = 23"
    assert "ready_groups_max must be ≥ trainer.groups_per_step (24)" in refusal(toml(text))


def test_every_mistake_has_its_line(toml):
    lines = refusal(toml("[trainer]\nsteps = 0\nlrr = 1\n[sampling]\ntokens_max = -1")).splitlines()
    assert [line.split()[0] for line in lines] == ["tokens_max", "steps", "unknown"]


def test_a_missing_or_broken_file_is_named(tmp_path, toml):
    assert f"no configuration file {tmp_path / 'no.toml'}" in refusal(tmp_path / "no.toml")
    assert "is no valid toml" in refusal(toml("x ="))
    assert f"no configuration file {tmp_path / 'config.json'}" in refusal(tmp_path)


def test_null_is_none_in_every_layer(toml):
    path = toml("[dispatch]\nmax_lag = 'null'")
    assert load(path, (), {}).dispatch.max_lag is None
    assert load(toml(""), ["dispatch.max_lag=null"], {}).dispatch.max_lag is None


def test_text_stays_text_on_the_command_line(toml):
    configuration = load(toml(""), ["run=2", "task.options.lines=3", "task.options.kind=a b"], {})
    assert configuration.run == "2"
    assert configuration.task.options == {"lines": 3, "kind": "a b"}


def test_booleans_may_have_the_spelling_of_python(toml):
    variable = {"ROLLSTREAM_TASK__TEMPLATE_VALUES__ENABLE_THINKING": "False"}
    configuration = load(toml(""), ["task.options.fast=True", "run=True"], variable)
    assert configuration.task.template_values == {"enable_thinking": False}
    assert configuration.task.options == {"fast": True}
    assert configuration.run == "True"


def test_the_origin_of_an_override_is_named(toml):
    assert "(trainer.lr in --set)" in refusal(toml(""), "trainer.lr=fast")
    assert "write it as key=value" in refusal(toml(""), "trainer.lr")
    environment = {"ROLLSTREAM_TRAINER__LR": "-1"}
    message = refusal(toml(""), environment=environment)
    assert "(trainer.lr in environment variable ROLLSTREAM_TRAINER__LR)" in message


def test_an_unknown_variable_is_refused_and_those_of_the_supervisor_are_not(toml):
    message = refusal(toml(""), environment={"ROLLSTREAM_TRAINER__LRR": "1"})
    assert "unknown key trainer.lrr in environment variable ROLLSTREAM_TRAINER__LRR" in message
    words = {"ROLLSTREAM_NONCE": "a", "ROLLSTREAM_HANDED_NONCE": "b", "ROLLSTREAM_PARENT": "1"}
    assert load(toml(""), (), words) == load(toml(""), (), {})


def test_a_wrong_value_in_a_list_of_tables_states_its_own_requirement(toml):
    assert "name must be text, got 5" in refusal(toml("[[task.parts]]\nname = 5"))
    assert "weight must be a number, got 'x'" in refusal(toml("[[task.parts]]\nweight = 'x'"))


def test_no_message_shows_a_secret(toml):
    message = refusal(toml(""), "bus=kafka://anna:hush@broker/1")
    assert "bus must not hold credentials" in message
    assert "hush" not in message
    assert "hush" not in refusal(toml("[task.options]\napi_key = [['hush']]"))
    nested = refusal(toml("[task.options]\ny = {z = {password = 'hush'}, w = 'seen'}"))
    assert "seen" in nested
    assert "hush" not in nested
    assert "hush" not in refusal(toml("[task]\nname = [{password = 'hush'}]"))


def test_the_resolved_configuration_is_not_changed_by_the_environment(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(Configuration(seed=3).model_dump_json())
    assert load(path, (), {"ROLLSTREAM_SEED": "5"}).seed == 3


def test_the_fingerprint_follows_what_matters_alone():
    same = Configuration(folder="elsewhere", rollouts={"count": 5})  # pyright: ignore
    other = Configuration(rollouts={"on_update": "keep_version"})  # pyright: ignore
    assert fingerprint(same) == fingerprint(Configuration())
    assert fingerprint(other) != fingerprint(Configuration())
    assert "rollouts.on_update" in essential_settings(other)
    assert "rollouts.count" not in essential_settings(other)


def test_the_quickstart_is_a_configuration():
    configuration = load(EXAMPLES / "quickstart.toml", (), {})
    assert flat_settings(configuration)["model.config.hidden_size"] == 128
    assert configuration.trainer.steps == 60


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.processes=0"], "processes must be ≥ 1, got 0 (trainer.processes in --set)"),
        (["trainer.processes=65"], "processes must be ≤ 64, got 65 (trainer.processes in --set)"),
        (
            ["trainer.processes=2", "trainer.device=cuda:1"],
            "device must be 'cpu', 'cuda' or 'auto' with trainer.processes > 1",
        ),
        (
            ["trainer.processes=2", "trainer.learner=paced", "rollouts.engine=paced"],
            "processes must be 1 with trainer.learner = 'paced': it has no model to share, got 2",
        ),
    ],
)
def test_processes_of_the_trainer_that_cannot_be(toml, settings, message):
    assert message in refusal(toml(""), *settings)


def test_the_number_of_processes_may_change_between_starts(toml):
    one, two = (load(toml(f"trainer.processes = {n}"), (), {}) for n in (1, 2))
    assert fingerprint(one) == fingerprint(two)


def test_a_setting_has_its_own_scope_else_that_of_its_table() -> None:
    scopes = {
        "trainer.lr": ESSENTIAL,  # neither declares one
        "trainer.workers": INCIDENTAL,
        "rollouts.slots": INCIDENTAL,  # of the table `rollouts`
        "rollouts.vllm.dtype": INCIDENTAL,
        "rollouts.engine": ESSENTIAL,  # an exception in that table
        "model.config.hidden_size": FIXED,  # an entry of a setting that is a table itself
        "rollouts.of_another_release": INCIDENTAL,
    }
    assert {key: setting_scope(key) for key in scopes} == scopes


def test_arguments_of_vllm_pass_through_and_those_of_the_run_are_refused_by_name(toml):
    text = (
        '[rollouts.vllm.args]\nquantization = "fp8"\nkv_transfer_config = {kv_role = "kv_both"}\n'
    )
    found = load(toml(text), ["rollouts.vllm.args.pipeline_parallel_size=2"], {})
    assert found.rollouts.vllm.args == {
        "quantization": "fp8",
        "kv_transfer_config": {"kv_role": "kv_both"},
        "pipeline_parallel_size": 2,
    }
    for argument, setting in (
        ("max_model_len=10", "rollouts.context_max"),
        ("enable_lora=true", "model.lora"),
        ("max_lora_rank=8", "model.lora.rank"),
        ("max_loras=2", "the engine"),
    ):
        own = refusal(toml(""), f"rollouts.vllm.args.{argument}")
        assert f"'{argument.split('=')[0]}', which is set by {setting}" in own
    url = "rollouts.vllm.url=http://host:8000"
    served = refusal(toml(text), "rollouts.engine=vllm", "rollouts.count=1", url)
    assert "must be empty with rollouts.vllm.url" in served


def test_an_inline_table_sets_each_of_its_keys_and_leaves_the_others(toml):
    given = 'task.options={path="rows.jsonl", held_out_share=0}'
    file = toml('[task]\nname = "dataset"\n[task.options]\nverifier = "a:b"')
    options = load(file, (given,), {}).task.options
    assert options == {"verifier": "a:b", "path": "rows.jsonl", "held_out_share": 0}


@pytest.mark.parametrize(
    ("text", "value"), [(".7", 0.7), ("1.", 1.0), ("1.e-1", 0.1), ("+.5", 0.5), ("1e-1", 0.1)]
)
def test_a_number_may_be_written_as_in_python(toml, text, value):
    assert load(toml(""), [f"trainer.lr={text}"], {}).trainer.lr == value
    assert load(toml(""), [], {"ROLLSTREAM_TRAINER__LR": text}).trainer.lr == value


def test_a_version_of_a_text_is_no_number(toml):
    with pytest.raises(ConfigurationError, match=r"must be a whole number, got '\.7'"):
        load(toml(""), ["trainer.steps=.7"], {})


@pytest.mark.parametrize("setting", ["store=file://store", "bus=sqlite://bus"])
def test_a_host_in_the_url_of_a_folder_is_refused(toml, setting):
    with pytest.raises(ConfigurationError, match="one slash or three"):
        load(toml(""), [setting], {})
    load(toml(""), [setting.replace("://", ":///")], {})


def test_a_preset_in_a_config_json_that_no_run_wrote_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"run": "hand", "trainer": {"preset": "dapo"}}))
    with pytest.raises(ConfigurationError, match=r"another name, e\.g\. run\.json"):
        load(path)
    write_configuration(RunFolder(tmp_path / "run"), load(path.rename(tmp_path / "run.json")))
    assert load(tmp_path / "run").trainer.loss == "ppo_clip"


def test_a_variable_that_a_config_json_overrules_is_named(tmp_path, toml, monkeypatch, capsys):
    folder = RunFolder(tmp_path / "run")
    write_configuration(folder, load(toml(""), [f"folder={folder.path}"], {}))
    monkeypatch.setenv("ROLLSTREAM_RELAY__SITE", "east")
    monkeypatch.setenv("ROLLSTREAM_TRAINER__STEPS", "7")
    monkeypatch.setenv("ROLLSTREAM_FOLDER", str(folder.path))
    words = ["config", str(folder.path), "relay.site", "--set", "trainer.steps=8"]
    assert main(words) == 0
    error = capsys.readouterr().err
    assert "ROLLSTREAM_RELAY__SITE is not used" in error
    assert 'relay.site = ""; change it with --set relay.site=…' in error
    assert "TRAINER" not in error
    assert "FOLDER" not in error
    monkeypatch.setenv("ROLLSTREAM_PARENT", "1")
    assert main(words) == 0
    assert capsys.readouterr().err == ""
