"""What a run records of its settings reads the same in an earlier release (invariant 14)."""

import json
from pathlib import Path

from rollstream.run.config.config import (
    changes_since_hash,
    essential_settings,
    fingerprint,
    flat_settings,
    load,
    setting_changes,
    store_configuration,
)
from rollstream.run.config.recorded_form import FIRST_RELEASE_SETTINGS
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration
from rollstream.storage.stored_settings import recorded_settings
from rollstream.storage.stores.connect import open_store

LEFT_OUT = Path(__file__).with_name("defaults_left_out.json")
"""The defaults of settings that are not recorded at their default, since each came."""


def test_a_setting_of_this_release_is_recorded_only_where_it_is_used(tmp_path: Path) -> None:
    store, plain = open_store(f"file:{tmp_path}"), Configuration()
    used = Configuration.model_validate({"trainer": {"epochs": 2}})
    for configuration in (plain, used):
        store_configuration(store, configuration)
    recorded = recorded_settings(store, fingerprint(plain))
    assert set(recorded) <= FIRST_RELEASE_SETTINGS | {"trainer.reward_terms.reward"}
    assert recorded_settings(store, fingerprint(used)) == recorded | {"trainer.epochs": 2}
    changes = changes_since_hash(store, fingerprint(used), plain)
    assert [(one.key, one.before, one.now) for one in changes] == [("trainer.epochs", 2, 1)]
    assert changes_since_hash(store, fingerprint(plain), plain) == []


def test_config_json_has_a_setting_of_this_release_only_where_it_is_used(tmp_path: Path) -> None:
    used = Configuration.model_validate(
        {"trainer": {"epochs": 2}, "model": {"config": {"hidden_size": 8}}, "task": {"options": {}}}
    )
    for name, configuration in (("plain", Configuration()), ("used", used)):
        write_configuration(RunFolder(tmp_path / name), configuration)
    plain = json.loads((tmp_path / "plain" / "config.json").read_text())
    again = json.loads((tmp_path / "used" / "config.json").read_text())
    assert "agent" not in plain
    assert "epochs" not in plain["trainer"]
    assert again["trainer"] == plain["trainer"] | {"epochs": 2}
    assert load(tmp_path / "used" / "config.json").trainer.epochs == 2
    assert flat_settings(load(tmp_path / "used" / "config.json")) == flat_settings(
        used.model_copy(update={"folder": str(tmp_path / "used")})
    )


def test_a_setting_that_this_release_does_not_have_is_a_difference() -> None:
    now = essential_settings(Configuration())
    (found,) = setting_changes(now | {"trainer.of_tomorrow": 3}, now)
    assert (found.key, found.before, found.now) == ("trainer.of_tomorrow", 3, None)


def test_the_default_of_a_setting_that_is_left_out_stays() -> None:
    """An earlier release, and a recorded run, take their default for it. A release adds its new
    settings to the file; one whose default has to change moves to `FIRST_RELEASE_SETTINGS`.
    """
    defaults = json.loads(json.dumps(essential_settings(Configuration())))
    kept = json.loads(LEFT_OUT.read_text())
    now = {key: defaults.get(key) for key in kept if key not in FIRST_RELEASE_SETTINGS}
    assert now == kept
