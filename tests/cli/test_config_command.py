"""`rollstream config`: what a setting means, its value, and where that value is set."""

import json
from pathlib import Path

import pytest

from rollstream.run.cli.look.config import CHANGES
from rollstream.run.cli.main import main
from rollstream.run.config.config import fingerprint, store_configuration
from rollstream.run.config.run_folder import (
    RunFolder,
    open_run_log_for_writing,
    store_url,
    write_configuration,
)
from rollstream.run.config.settings import Configuration
from rollstream.storage.settings import Scope
from rollstream.storage.stores.connect import open_store
from rollstream.streams.records import Configured, Take
from rollstream.streams.topics import catalogue
from rollstream.streams.values import SettingsSince
from rollstream.streams.writer import FencedWriter


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my.toml"
    path.write_text("[trainer]\nlr = 1e-4\nsteps = 9\n")
    return path


def found(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    assert main(["config", *words, "--json"]) == 0
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    return {line["setting"]: line for line in lines}


def test_every_answer_to_whether_a_setting_may_change_has_a_sentence() -> None:
    assert {scope.value for scope in Scope} == CHANGES.keys()


def test_a_setting_is_explained_in_full(toml: Path, capsys) -> None:
    assert main(["config", "my.toml", "trainer.lr"]) == 0
    assert capsys.readouterr().out == (
        "trainer.lr = 0.0001  (set in my.toml)\n"
        "  Peak learning rate.\n"
        "  type: number > 0; default: 0.0005\n"
        "  may change between two starts of a run with --accept-config\n"
    )


def test_each_value_names_where_it_is_set(toml: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("ROLLSTREAM_TRAINER__STEPS", "7")
    lines = found("my.toml", "trainer", "--set", "trainer.lr_final=0.5", capsys=capsys)
    sources = {key: (line["value"], line["set_in"]) for key, line in lines.items()}
    assert sources["trainer.lr"] == ("0.0001", "my.toml")
    assert sources["trainer.steps"] == ("7", "environment variable ROLLSTREAM_TRAINER__STEPS")
    assert sources["trainer.lr_final"] == ("0.5", "--set")
    assert sources["trainer.clip_low"] == ("0.2", "the defaults")
    assert sources["trainer.loss"] == ('"truncated_is"', "trainer.preset = topr")
    assert sources["trainer.preset"] == ('"topr"', "the default preset")
    assert all(key.startswith("trainer.") for key in lines)


def test_a_setting_of_the_table_of_the_loss_is_found_by_either_name(toml: Path, capsys) -> None:
    toml.write_text('[trainer.loss]\nkind = "ppo_clip"\nclip_low = 0.1\n')
    for key, value in (("trainer.loss.clip_low", "0.1"), ("trainer.loss.kind", '"ppo_clip"')):
        (line,) = found("my.toml", key, capsys=capsys).values()
        assert (line["value"], line["set_in"]) == (value, "my.toml [trainer.loss]")


def test_a_name_without_its_table_is_found(toml: Path, capsys) -> None:
    assert [*found("my.toml", "max_lag", capsys=capsys)] == ["dispatch.max_lag"]


def test_without_a_run_the_defaults_are_explained(toml: Path, capsys) -> None:
    lines = found(capsys=capsys)
    assert len(lines) > 150
    origins = {line["set_in"] for line in lines.values()}
    assert origins == {"the defaults", "the default preset", "trainer.preset = topr"}


def test_the_newest_run_is_explained_by_default(toml: Path, capsys) -> None:
    folder = RunFolder(toml.parent / "runs" / "one")
    write_configuration(folder, Configuration(seed=5, folder=str(folder.path)))
    assert found("seed", capsys=capsys)["seed"]["value"] == "5"
    assert found("one", "seed", capsys=capsys)["seed"]["set_in"] == "config.json"


@pytest.mark.parametrize(
    ("key", "answer"),
    [("trainer.lrr", "nearest known: trainer.lr"), ("learning_rate", "here: trainer.lr")],
)
def test_an_unknown_setting_names_the_nearest(toml: Path, key: str, answer: str, capsys) -> None:
    assert main(["config", key]) == 2
    assert f"unknown setting {key}; {answer}" in capsys.readouterr().err


def test_a_secret_is_not_shown(toml: Path, capsys) -> None:
    toml.write_text('[task.options]\napi_key = "hidden"\n')
    main(["config", "my.toml", "task.options"])
    assert "hidden" not in capsys.readouterr().out


def configuration(folder: Path, *, lr: float = 5e-4, tokens_max: int = 420) -> Configuration:
    given = {"trainer": {"lr": lr}, "sampling": {"tokens_max": tokens_max}}
    return Configuration.model_validate({"folder": str(folder), **given})


def start_trainers(folder: Path, *starts: tuple[int, Configuration]) -> None:
    """Each start has a term of its own: the step after which it begins, and its settings."""
    write_configuration(RunFolder(folder), starts[0][1])
    bus = open_run_log_for_writing(starts[0][1], folder)
    bus.create(catalogue(1))
    for term, (step, one) in enumerate(starts, 1):
        store_configuration(open_store(store_url(one, folder)), one)
        writer = FencedWriter(bus, "ledger", "trainer", term)
        writer.open()
        writer.append([("run", Configured(fingerprint(one), "revision", step))])
    bus.close()


def changes(
    folder: Path, *words: str, capsys: pytest.CaptureFixture[str]
) -> list[tuple[object, ...]]:
    assert main(["config", str(folder), *words, "--changes", "--json"]) == 0
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    return [(line["step"], line["setting"], line["before"], line["after"]) for line in lines]


def test_what_changed_in_a_run_is_printed_with_its_step(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    start_trainers(
        folder,
        (0, configuration(folder)),
        (7, configuration(folder, tokens_max=4)),
        (7, configuration(folder, tokens_max=4)),
        (9, configuration(folder, lr=1e-4)),
    )
    assert changes(folder, capsys=capsys) == [
        (7, "sampling.tokens_max", "420", "4"),
        (9, "sampling.tokens_max", "4", "420"),
        (9, "trainer.lr", "0.0005", "0.0001"),
    ]
    assert changes(folder, "trainer", capsys=capsys) == [(9, "trainer.lr", "0.0005", "0.0001")]
    assert main(["config", str(folder), "seed", "--changes"]) == 0
    assert capsys.readouterr().out == "no setting was changed\n"
    assert main(["config", str(folder), "--changes"]) == 0
    assert "sampling.tokens_max\t420" in capsys.readouterr().out


def test_settings_that_are_not_kept_are_named_and_passed_over(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    lost = configuration(folder, tokens_max=4)
    start_trainers(folder, (0, configuration(folder)), (7, lost), (9, configuration(folder)))
    open_store(store_url(lost, folder)).delete(f"configurations/{fingerprint(lost)}.json")
    assert main(["config", str(folder), "--changes"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "no setting was changed\n"
    assert "the settings from step 7 on are not kept" in printed.err


def test_a_setting_of_prompts_is_printed_with_its_first_group(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    now = configuration(folder, tokens_max=4, lr=1e-4)
    start_trainers(folder, (0, configuration(folder)), (7, now))
    bus = open_run_log_for_writing(now, folder)
    writer = FencedWriter(bus, "ledger", "trainer", 3)
    writer.open()
    writer.append([("run", Take(8, 0, 0, (), (), settings=(SettingsSince(31, fingerprint(now)),)))])
    bus.close()
    assert main(["config", str(folder), "--changes", "--json"]) == 0
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert {line["setting"]: line["group"] for line in lines} == {
        "sampling.tokens_max": 31,
        "trainer.lr": None,
    }
