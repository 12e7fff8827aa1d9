"""Defaults that follow `rollouts.on_update`: what is set wins, and recorded settings stay. A preset
ranks as its source does: it wins over lower ones.
"""

from pathlib import Path

import pytest

from rollstream.consumers.objective_settings import OBJECTIVE_PRESETS
from rollstream.errors import ConfigurationError
from rollstream.run.config.config import load, load_layers
from rollstream.run.config.errors import setting_origin
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration

KEEP = "rollouts.on_update=keep_version"
ORIGIN = "the defaults of rollouts.on_update = keep_version"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "empty.toml"
    path.write_text("", encoding="utf-8")
    return path


def test_keep_version_bounds_the_work_outstanding_and_not_the_lag(empty: Path):
    c = load(empty, (KEEP, "trainer.groups_per_step=10"))
    assert c.dispatch.max_lag is None
    assert c.dispatch.ready_groups_max == 40
    assert c.dispatch.repack


@pytest.mark.parametrize("mode", ["in_flight", "in_flight_recompute"])
def test_policies_that_mask_old_tokens_keep_their_bound(empty: Path, mode: str):
    assert load(empty, (f"rollouts.on_update={mode}",)).dispatch.max_lag == 4
    assert load(empty).dispatch == Configuration().dispatch


def test_what_is_set_wins_in_every_layer(empty: Path):
    empty.write_text("[dispatch]\nready_groups_max = 99\n", encoding="utf-8")
    variables = {"ROLLSTREAM_ROLLOUTS__QUOTA": "5"}
    c = load(empty, (KEEP, "dispatch.max_lag=3"), variables)
    found = c.dispatch.max_lag, c.dispatch.ready_groups_max, c.rollouts.quota
    assert found == (3, 99, 5)
    assert load(empty, (KEEP, "dispatch.max_lag=null")).dispatch.max_lag is None


def test_a_rollout_draws_its_share_of_a_step_but_no_more_than_two_batches(empty: Path):
    sizes = ("trainer.groups_per_step=12", "trainer.samples_per_group=4", "rollouts.count=5")
    assert load(empty, (KEEP, *sizes, "rollouts.slots=64")).rollouts.quota == 10
    assert load(empty, (KEEP, *sizes, "rollouts.slots=4")).rollouts.quota == 8


def test_with_adapters_nothing_is_repacked_and_nothing_has_a_quota(empty: Path):
    c = load(empty, (KEEP, "model.lora.rank=8"))
    assert not c.dispatch.repack
    assert c.rollouts.quota is None
    assert c.dispatch.max_lag is None


def test_a_default_of_the_policy_names_its_origin(empty: Path):
    layers = load_layers(empty, (KEEP,), {})
    assert setting_origin("dispatch.max_lag", layers) == ORIGIN
    assert setting_origin("dispatch.queue_per_slot", layers) == "the defaults"


def test_a_run_keeps_the_settings_that_it_recorded(tmp_path: Path):
    """Also one that an earlier release recorded with other defaults."""
    own = Configuration().rollouts.model_copy(update={"on_update": "keep_version"})
    folder = RunFolder(tmp_path / "run")
    write_configuration(folder, Configuration(rollouts=own, folder=str(folder.path)))
    c = load(folder.configuration)
    assert (c.dispatch.max_lag, c.dispatch.ready_groups_max, c.rollouts.quota) == (4, 256, None)


@pytest.mark.parametrize(
    "wrong", ["trainer.groups_per_step=many", "rollouts.slots=0", "trainer.preset=[1]"]
)
def test_values_that_are_refused_are_refused_by_their_own_name(empty: Path, wrong: str):
    with pytest.raises(ConfigurationError, match=wrong.partition("=")[0]):
        load(empty, (KEEP, wrong))


def test_a_preset_gives_defaults_and_what_is_set_wins(empty: Path):
    chosen = "trainer.preset=dapo", "trainer.clip_high=0.3", "sampling.tokens_max=100"
    trainer = load(empty, chosen).trainer
    assert (trainer.loss, trainer.aggregate, trainer.clip_low) == ("ppo_clip", "token", 0.2)
    assert trainer.clip_high == 0.3
    assert trainer.filter_equal_rewards
    assert trainer.overlong_penalty == (80, 100)
    assert load_layers(empty, chosen, {}).origins["trainer.loss"] == "trainer.preset = dapo"


OWN_OBJECTIVE = """[trainer]
advantage = "centred"
loss = "truncated_is"
aggregate = "prompt"
ratio_max = 3
filter_equal_rewards = true
reference_kl = 0.1
mask_ratio = [0.5, 2.0]
"""


def test_a_preset_of_a_higher_source_decides_the_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own-objective.toml"
    path.write_text(OWN_OBJECTIVE, encoding="utf-8")
    trainer = load(path, ("trainer.preset=gspo", "trainer.clip_high=0.01")).trainer
    assert (trainer.loss, trainer.ratio, trainer.advantage) == ("ppo_clip", "sequence", "grpo")
    assert (trainer.aggregate, trainer.clip_low) == ("sequence", 3e-4)
    assert trainer.clip_high == 0.01, "of the same source"
    assert (trainer.ratio_max, trainer.filter_equal_rewards) == (2.0, False), "their defaults"
    assert (trainer.reference_kl, trainer.mask_ratio) == (0.1, (0.5, 2.0)), "of no preset"
    replaced, kept = capsys.readouterr().err.splitlines()
    assert replaced.startswith("rollstream: trainer.preset = gspo in --set decides: ")
    assert 'trainer.loss = "ppo_clip" (in own-objective.toml: "truncated_is")' in replaced
    assert "trainer.ratio_max = 2.0 (in own-objective.toml: 3)" in replaced
    assert kept == (
        "rollstream: kept against trainer.preset = gspo in --set: "
        "trainer.clip_high = 0.01 (in --set; the preset: 0.0004)"
    )


def test_a_preset_in_a_file_gives_way_to_the_file_and_what_is_above(tmp_path: Path):
    path = tmp_path / "own-preset.toml"
    path.write_text(f'{OWN_OBJECTIVE}preset = "gspo"\n', encoding="utf-8")
    variables = {"ROLLSTREAM_TRAINER__CLIP_LOW": "0.1"}
    trainer = load(path, ("trainer.ratio=token",), variables).trainer
    assert (trainer.loss, trainer.aggregate, trainer.ratio_max) == ("truncated_is", "prompt", 3)
    assert (trainer.clip_low, trainer.ratio, trainer.clip_high) == (0.1, "token", 4e-4)


def test_a_preset_of_the_environment_ranks_between_file_and_command_line(tmp_path: Path):
    path = tmp_path / "between.toml"
    path.write_text(OWN_OBJECTIVE, encoding="utf-8")
    variables = {"ROLLSTREAM_TRAINER__PRESET": "dapo"}
    trainer = load(path, ("trainer.clip_high=0.5",), variables).trainer
    assert (trainer.preset, trainer.loss, trainer.aggregate) == ("dapo", "ppo_clip", "token")
    assert trainer.clip_high == 0.5


def test_a_preset_decides_over_what_a_run_recorded(tmp_path: Path):
    """So a replay or a fork trains under it; without one the recorded objective stays."""
    folder = RunFolder(tmp_path / "run")
    settings = ("trainer.preset=dapo", "trainer.lr=1e-4", f"folder={folder.path}")
    empty = tmp_path / "empty.toml"
    empty.write_text("", encoding="utf-8")
    recorded = load(empty, settings)
    write_configuration(folder, recorded)
    assert load(folder.configuration).trainer == recorded.trainer
    trainer = load(folder.configuration, ("trainer.preset=grpo",)).trainer
    assert trainer == load(empty, ("trainer.preset=grpo", "trainer.lr=1e-4")).trainer
    assert (trainer.overlong_penalty, trainer.filter_equal_rewards) == (None, False)


@pytest.mark.parametrize("preset", OBJECTIVE_PRESETS)
def test_every_preset_is_a_configuration(empty: Path, preset: str):
    trainer = load(empty, (f"trainer.preset={preset}",)).trainer
    for name, value in OBJECTIVE_PRESETS[preset].items():
        found = getattr(trainer, name)
        assert (list(found) if isinstance(found, tuple) else found) == value


@pytest.mark.parametrize("part", ["loss=ppo_clip", "preset=", "ratio_max=3"])
def test_a_part_of_the_objective_replaces_the_default_preset_as_a_whole(empty: Path, part: str):
    """Parts of the default that nobody chose do not mix with the one that was."""
    trainer = load(empty, (f"trainer.{part}",)).trainer
    name, _, value = part.partition("=")
    assert str(getattr(trainer, name)).removesuffix(".0") == value
    assert trainer.model_copy(update={name: getattr(Configuration().trainer, name)}) == (
        Configuration().trainer
    )
