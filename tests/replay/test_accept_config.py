"""A run continues under another configuration only with `--accept-config`, and the ledger records
it.
"""

import threading
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigurationError
from rollstream.run.cli.configuration import load_and_settle
from rollstream.run.cli.main import main, parse
from rollstream.run.config.config import accept_change, fingerprint, store_configuration
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration
from rollstream.storage.stored_settings import configuration_key
from rollstream.streams.records import Configured, StepDone
from testbed.memory import MemoryStore
from tests.support.tiny_run import TinyRun, tiny_run


def changed(**settings: Any) -> Configuration:
    return Configuration(trainer=settings)  # pyright: ignore[reportArgumentType]


def trained(run: TinyRun, configuration: Configuration, term: int, accepted: bool) -> None:
    store_configuration(run.store, configuration)
    run.configuration_hash = fingerprint(configuration)
    run.accept = lambda before: accept_change(run.store, configuration, accepted, before)
    assert run.train(term)


def configured(run: TinyRun) -> list[tuple[str, bool]]:
    return [(c.configuration_hash, c.accepted) for c in run.records("ledger", Configured)]


def test_a_changed_configuration_is_refused_with_each_field_then_and_now():
    store = MemoryStore()
    store_configuration(store, Configuration())
    before = fingerprint(Configuration())
    with pytest.raises(ConfigurationError) as error:
        accept_change(store, changed(lr=1e-3, loss="ppo_clip"), False, before)
    assert "  trainer.lr: 0.0005 in the run, 0.001 asked for" in str(error.value)
    assert '  trainer.loss: "truncated_is" in the run, "ppo_clip" asked for' in str(error.value)
    assert "--accept-config" in str(error.value)
    assert accept_change(store, changed(lr=1e-3), True, before)


def test_what_no_checkpoint_survives_is_refused_even_if_accepted():
    store = MemoryStore()
    store_configuration(store, Configuration())
    with pytest.raises(ConfigurationError, match=r"trainer.updates_per_step: 1 in the run, 2"):
        accept_change(store, changed(updates_per_step=2), True, fingerprint(Configuration()))


def test_a_setting_that_an_earlier_program_had_not_was_its_default():
    store = MemoryStore()
    store.create(configuration_key("old"), b'{"seed": 0}')
    assert not accept_change(store, Configuration(), False, "old")
    with pytest.raises(ConfigurationError, match=r"seed: 0 in the run, 3 asked for"):
        accept_change(store, Configuration(seed=3), False, "old")


def test_a_configuration_that_is_not_kept_needs_acceptance():
    with pytest.raises(ConfigurationError, match="not kept"):
        accept_change(MemoryStore(), Configuration(), False, "gone")
    assert accept_change(MemoryStore(), Configuration(), True, "gone")


def test_the_ledger_records_what_was_accepted_and_only_then(tmp_path: Path):
    with tiny_run(tmp_path, trainer={"steps": 2}) as run:
        run.start_all()
        trained(run, Configuration(), 1, False)
        trained(run, Configuration(), 2, False)
        with pytest.raises(ConfigurationError, match=r"trainer.lr"):
            trained(run, changed(lr=1e-3), 3, False)
        trained(run, changed(lr=1e-3), 4, True)
        trained(run, changed(lr=1e-3), 5, True)
        one, two = fingerprint(Configuration()), fingerprint(changed(lr=1e-3))
        assert configured(run) == [(one, False), (one, False), (two, True), (two, False)]


@pytest.mark.parametrize("change", [{"groups_per_step": 2}, {"survivors_min": 4}])
def test_a_run_resumes_under_accepted_changes_behind_its_checkpoint(tmp_path: Path, change: dict):
    """Steps in the ledger are trained on the part of their takes that the new rules leave."""
    with tiny_run(tmp_path, trainer={"steps": 6}) as run:
        run.start_all()
        stop = threading.Event()
        stopping = stop_after(run, 2, stop)
        run.train(1, stop)
        stopping.join()
        run.trainer = run.trainer.model_copy(update=change)
        assert run.train(2)
        assert max(d.step for d in run.records("ledger", StepDone)) == 6


def stop_after(run: TinyRun, steps: int, stop: threading.Event) -> threading.Thread:
    def watch() -> None:
        while len(run.records("ledger", StepDone)) < steps:
            stop.wait(0.05)
        stop.set()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_the_command_line_accepts_it_and_the_folder_follows(tmp_path: Path, capsys):
    write_configuration(RunFolder(tmp_path), Configuration(folder=str(tmp_path)))
    with pytest.raises(ConfigurationError, match=r"--accept-config"):
        write_configuration(RunFolder(tmp_path), Configuration(folder=str(tmp_path), seed=5))
    write_configuration(
        RunFolder(tmp_path), Configuration(folder=str(tmp_path), seed=5), accepted=True
    )
    assert '"seed": 5' in (tmp_path / "config.json").read_text()
    words = ["train", str(tmp_path / "config.json"), "--set", "trainer.updates_per_step=2"]
    assert main([*words, "--accept-config"]) == 2
    assert "cannot change in a run" in capsys.readouterr().err
    assert '"updates_per_step": 1' in (tmp_path / "config.json").read_text()


def test_another_seed_beside_the_runs_own_configuration_is_refused(tmp_path: Path):
    write_configuration(RunFolder(tmp_path), Configuration(folder=str(tmp_path)))
    line = ["train", str(tmp_path / "config.json"), "--seed", "5"]
    with pytest.raises(ConfigurationError, match=r"seed: 0 in the run, 5 asked for"):
        load_and_settle(parse(line))
    load_and_settle(parse([*line, "--accept-config"]))
    assert '"seed": 5' in (tmp_path / "config.json").read_text()
