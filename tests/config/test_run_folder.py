"""A run's folder belongs to one configuration, and to one supervisor at a time."""

import subprocess
import sys

import pytest

from rollstream.errors import ConfigurationError, LeaseHeld
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import (
    RunFolder,
    bus_url,
    check_changes,
    folder_of_run,
    store_url,
    write_configuration,
)
from rollstream.run.config.run_model import model_folder
from rollstream.run.config.settings import Configuration
from rollstream.run.supervisor.supervisor import RunLock


def configured(path, **settings) -> Configuration:
    return Configuration(folder=str(path), **settings)


def test_the_resolved_configuration_is_loadable(tmp_path):
    configuration = configured(tmp_path, seed=4)
    write_configuration(folder_of_run(configuration), configuration)
    assert load(tmp_path / "config.json", (), {}) == configuration


def test_another_configuration_is_refused_with_the_difference(tmp_path):
    write_configuration(RunFolder(tmp_path), configured(tmp_path))
    with pytest.raises(ConfigurationError) as error:
        write_configuration(RunFolder(tmp_path), configured(tmp_path, seed=9, trainer={"lr": 1e-3}))
    assert "  seed: 0 in the run, 9 asked for" in str(error.value)
    assert "  trainer.lr: 0.0005 in the run, 0.001 asked for" in str(error.value)
    assert load(tmp_path / "config.json", (), {}).seed == 0


def test_the_type_of_versions_is_fixed_where_adapters_are_trained(tmp_path):
    for rank in (0, 4):
        folder = RunFolder(tmp_path / str(rank))
        lora = {"model": {"lora": {"rank": rank}}}
        write_configuration(folder, Configuration.model_validate(lora))
        changed = Configuration.model_validate({**lora, "weights": {"dtype": "float32"}})
        if not rank:
            assert check_changes(folder, changed, accepted=True)
            continue
        with pytest.raises(ConfigurationError, match=r"weights\.dtype cannot change in a run"):
            check_changes(folder, changed, accepted=True)


def test_what_only_moves_work_about_may_change(tmp_path):
    write_configuration(RunFolder(tmp_path), configured(tmp_path))
    write_configuration(RunFolder(tmp_path), configured(tmp_path, rollouts={"count": 3}))
    assert load(tmp_path / "config.json", (), {}).rollouts.count == 3


def test_a_moved_run_finds_its_new_folder(tmp_path):
    write_configuration(RunFolder(tmp_path / "old"), configured(tmp_path / "old"))
    (tmp_path / "old").rename(tmp_path / "new")
    assert folder_of_run(load(tmp_path / "new" / "config.json", (), {})).path == tmp_path / "new"


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"Not a directory.*--run DIR names another"):
        write_configuration(RunFolder(tmp_path / "file" / "run"), Configuration())


def test_relative_urls_are_inside_the_folder(tmp_path):
    configuration = Configuration(store="file:/elsewhere")
    assert bus_url(configuration, tmp_path) == f"sqlite:{tmp_path}/bus"
    assert store_url(configuration, tmp_path) == "file:/elsewhere"
    assert model_folder(configuration, tmp_path) == tmp_path / "model"


def test_a_second_supervisor_is_refused_with_the_name_of_the_first(tmp_path):
    first = RunLock(tmp_path)
    with pytest.raises(LeaseHeld, match=r"running already \(supervisor: process \d+\)"):
        RunLock(tmp_path, wait_s=0)
    first.close()
    RunLock(tmp_path, wait_s=0).close()


def test_the_lock_is_held_until_the_last_role_ends(tmp_path):
    first = RunLock(tmp_path)
    role = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[first.descriptor]
    )
    first.close()
    with pytest.raises(LeaseHeld):
        RunLock(tmp_path, wait_s=0)
    role.communicate(b"\n")
    RunLock(tmp_path, wait_s=0).close()


def test_nonces_are_left_for_the_next_supervisor_and_a_torn_file_is_none(tmp_path):
    lock = RunLock(tmp_path)
    assert lock.nonces() == {}
    lock.keep_nonces({"trainer": "abc"})
    assert lock.nonces() == {"trainer": "abc"}
    (tmp_path / "nonces.json").write_text('{"tra')
    assert lock.nonces() == {}
    lock.close()
