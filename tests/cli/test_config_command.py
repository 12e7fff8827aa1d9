"""`rollstream config`: what a setting means, its value, and where that value is set."""

import json
from pathlib import Path

import pytest

from rollstream.cli.main import main
from rollstream.config.run_folder import RunFolder, write_configuration
from rollstream.config.settings import Configuration


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
