"""A run whose model is on one host only, while it is uploaded: every role on its own host, with a
folder of its own, trains from the store.
"""

import shutil
import signal
from pathlib import Path

import pytest
import torch

from rollstream.errors import ConfigurationError
from rollstream.look.query.locate import locate_run
from rollstream.look.query.looking import model_file
from rollstream.run.cli import run
from rollstream.run.cli.main import main
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.run_model import run_model, store_starting_model, task_settings
from rollstream.run.signals import StopSignals
from rollstream.storage.starting_model.manifest import MODEL_KEY, read_model_manifest
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.file import FileStore
from rollstream.storage.weights.pointer import advance_pointer, take_pointer
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.streams.values import Version
from testbed.run_driver import RunDriver, set_words
from testbed.run_process import SETTINGS, assert_the_log_adds_up, random_model

STEPS = 3
ROLES = ("trainer", "dispatch", "prompts", "rollout")


def configured(tmp_path: Path, *more: str) -> list[str]:
    """The command line's CONFIG and settings: one log and store, which all hosts reach."""
    file = tmp_path / "tiny.toml"
    file.write_text('run = "tiny"\n')
    settings = [
        *SETTINGS, f"trainer.steps={STEPS}", f"bus=sqlite:{tmp_path / 'bus'}",
        f"store=file:{tmp_path / 'store'}", f"model.path={tmp_path / 'first' / 'model'}",
        "archive.enabled=false", *more,
    ]  # fmt: skip
    return [str(file), *set_words(settings)]


@pytest.mark.slow
def test_roles_train_a_model_that_is_on_none_of_their_hosts(tmp_path):
    model = random_model(tmp_path / "first" / "model")
    words = configured(tmp_path)
    assert main(["put-model", str(model), *words]) == 0
    shutil.rmtree(tmp_path / "first")
    host = tmp_path / "host-trainer"
    settings = [word for word in words[1:] if word != "--set"]
    with RunDriver(host, Path(words[0]), settings, vital=("trainer",)) as run:
        for name in ROLES:
            run.start(name, folder=tmp_path / f"host-{name}")
        run.wait_complete()
    assert_the_log_adds_up(host, STEPS)
    assert "of the starting model's" in run.newest("trainer").text
    held = {path.suffix for path in (host / "model").rglob("*") if path.is_file()}
    assert ".safetensors" not in held
    other = locate_run(str(tmp_path / "host-dispatch"))  # dispatch needed no tokenizer
    assert model_file(other, "tokenizer.json")
    again = tmp_path / "again"  # needs the weights, which are in the store alone
    assert main(["replay", str(host), "--from-step", "1", "--out", str(again)]) == 0
    assert (again / "model" / "model.safetensors").is_file()
    fork = tmp_path / "fork"
    more = ("trainer.steps=4", "bus=sqlite:bus", "store=file:store")
    words = [word for setting in more for word in ("--set", setting)]
    assert main(["fork", str(host), "--at", "3", "--out", str(fork), *words]) == 0
    assert (fork / "store" / MODEL_KEY).is_file()


@pytest.mark.slow
def test_put_model_again_is_accepted_and_another_model_is_refused(tmp_path, capsys):
    model = random_model(tmp_path / "first" / "model")
    words = configured(tmp_path)
    for _ in range(2):
        assert main(["put-model", str(model), *words]) == 0
        assert "run tiny starts from the model" in capsys.readouterr().out
    config = model / "generation_config.json"
    config.write_text(config.read_text().replace("{", '{"top_k": 7,', 1))
    assert main(["put-model", str(model), *words]) == 2
    assert "generation_config.json differs" in capsys.readouterr().err
    c = load(words[0], [word for word in words[1:] if word != "--set"], {})
    with pytest.raises(ConfigurationError, match=r"generation_config\.json differs"):
        store_starting_model(open_store(c.store), c, tmp_path)


def test_a_run_that_began_without_a_stored_model_stays_as_it_is(tmp_path):
    random_model(tmp_path / "first" / "model")
    words = configured(tmp_path)
    c = load(words[0], [word for word in words[1:] if word != "--set"], {})
    store = open_store(c.store)
    believe_a_version(store)
    assert store_starting_model(store, c, tmp_path) is None
    assert read_model_manifest(store) is None
    assert run_model(c, tmp_path) is None
    assert task_settings(c, tmp_path).tokenizer == str(tmp_path / "first" / "model")


class StoppingStore(FileStore):
    """Gets a stop signal at its first write, as in the middle of an upload."""

    def create(self, key, data):
        signal.raise_signal(signal.SIGTERM)
        return super().create(key, data)


def test_a_stop_signal_ends_the_upload_and_the_next_start_makes_it(tmp_path):
    model = random_model(tmp_path / "first" / "model")
    words = configured(tmp_path)
    c = load(words[0], [word for word in words[1:] if word != "--set"], {})
    folder, signals = RunFolder(tmp_path / "host"), StopSignals()
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.stop.set())
    try:
        assert not run.has_uploaded(StoppingStore(tmp_path / "store"), c, folder, signals)
        assert not signals.stop.is_set()
        assert read_model_manifest(open_store(c.store)) is None
        assert run.has_uploaded(open_store(c.store), c, folder, signals)
    finally:
        signal.signal(signal.SIGTERM, before)
    manifest = read_model_manifest(open_store(c.store))
    assert manifest is not None
    assert {entry.name for entry in manifest.files} >= {
        path.name for path in model.glob("*.safet*")
    }


def believe_a_version(store) -> None:
    take_pointer(store, "tiny", 1)
    new = NewVersion("tiny", Version(0, 1), {"w": torch.ones(2)}, {}, 1 << 20, 0.0)
    advance_pointer(store, publish_version(store, new))


def test_a_model_that_is_nowhere_is_refused_before_the_run_has_a_folder(tmp_path, capsys):
    words = configured(tmp_path)
    assert main(["run", *words, "--run", str(tmp_path / "run")]) == 2
    refusal = capsys.readouterr().err
    assert "must be a folder with a Hugging Face checkpoint" in refusal
    assert "put-model" in refusal
    assert not (tmp_path / "run" / "config.json").exists()
