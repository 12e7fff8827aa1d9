"""`rollstream tune`: a table with the settings to change, one JSON object, a configuration that
loads, and one line for what cannot be tuned.
"""

import json
import tomllib
from pathlib import Path

import pytest

from rollstream.plan.tuning.proposed_toml import merged_tables, table_lines
from rollstream.run.cli.main import main
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import RunFolder
from tests.support.synthetic_run import publish_run
from tests.tuning.worlds import configured

FAST = ["--hold", "slots", "--hold", "on_update", "--hold", "max_lag"]


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A paced configuration with two rollouts that would need more: its trainer hardly computes."""
    changed = configured(
        dispatch={"max_lag": 4},
        trainer={"groups_per_step": 32},
        paced={"train_token_s": 1e-6, "train_step_s": 0.01},
    )
    path = tmp_path_factory.mktemp("tune") / "paced.toml"
    values = changed.model_dump(mode="json", exclude_unset=True)
    path.write_text("\n".join(table_lines(values)) + "\n")
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run of 20 steps, with the default configuration."""
    return publish_run(tmp_path_factory.mktemp("recorded") / "run", steps=20)


def test_a_proposal_is_one_json_object(paced: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["tune", str(paced), "--gpus", "5", *FAST, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"rollouts.count": 4}
    assert found["gain"] > 0.2
    assert found["present_fits"]
    assert found["proposed"]["trainer_gpus"] == 1
    assert found["proposed"]["tokens_per_s"] > found["present"]["tokens_per_s"]
    assert found["proposed"]["lag_mean"] <= found["proposed"]["lag_max"]
    assert found["assumed"]
    assert found["unknown"]


def test_the_table_ends_with_settings_and_what_was_assumed(
    paced: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["tune", str(paced), "--gpus", "5", *FAST]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].split() == [
        "split", "slots", "max_lag", "on_update", "repack", "tokens/s", "×", "lag", "idle",
    ]  # fmt: skip
    assert lines[1].split()[:2] == ["best", "4+1"]
    assert any(line.split()[:2] == ["now", "2+1"] for line in lines)
    assert max(map(len, lines[:8])) <= 80
    assert "[rollouts]\ncount = 4\n" in text
    assert "assumed: a trainer that is as much faster" in text
    assert "not known: what lag costs" in text


def test_the_written_configuration_is_the_proposed_one(paced: Path, tmp_path: Path):
    tuned = tmp_path / "tuned.toml"
    words = ["tune", str(paced), "--gpus", "5", *FAST, "--set", "seed=7", "--toml", str(tuned)]
    assert main(words) == 0
    c, before = load(tuned, (), {}), load(paced, ["seed=7"], {})
    assert c.rollouts.count == 4
    rollouts = c.rollouts.model_copy(update={"count": 2})
    assert c.model_copy(update={"rollouts": rollouts}) == before


def test_nested_tables_and_null_survive_toml():
    values = {"a": 1, "b": None, "t": {"x": [1, {"y z": True}], "u": {"w": 'q"'}}}
    read = tomllib.loads("\n".join(table_lines(merged_tables(values, {"t.u.v": 2.5}))))
    assert read == {
        "a": 1,
        "b": "null",
        "t": {"x": [1, {"y z": True}], "u": {"w": 'q"', "v": 2.5}},
    }


def test_a_recorded_run_shows_what_is_needed(run: RunFolder, capsys: pytest.CaptureFixture[str]):
    """Step times, training times and lengths are those of the run, which CONFIG names too."""
    words = ["tune", str(run.configuration), "--gpus", "4", *FAST]
    assert main([*words, "--json"]) == 0
    of_itself = capsys.readouterr().out
    assert main([*words[:2], str(run.path), *words[2:], "--json"]) == 0
    assert capsys.readouterr().out == of_itself
    found = json.loads(of_itself)
    assert found["proposed"]["tokens_per_s"] > 0
    assert any("fitted to RUN's answers" in text for text in found["assumed"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "1"], "give --gpus 2 or more"),
        (["--gpus", "4", "--lag-max", "-1"], "--lag-max must lie in"),
        (["--gpus", "2", "--hold", "split"], "the configuration takes 3 GPUs"),
        (["nowhere", "--gpus", "4"], "no such run or archive"),
        (["--gpus", "4", *FAST, "--toml", "no/such/folder.toml"], "--toml no/such/folder.toml"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    paced: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["tune", str(paced), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["tune", "x", "--gpus", "0"],
        ["tune", "x", "--gpus", "9" * 30],
        ["query", "x", "SELECT 1", "--rows", "9" * 30],
        ["explore", "x", "--port", "99999"],
        ["explore", "x", "--nice", "9" * 30],
        ["health", "--port", "-1"],
        ["health", "--port", "x"],
    ],
)
def test_a_number_that_an_option_cannot_have_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert refused.value.code == 2
    assert f"argument {words[-2]}: must be a whole number from" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named_before_the_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "torch.toml"
    path.write_text('run = "new"\n')  # without speeds nothing can be simulated
    assert main(["tune", str(path), "--gpus", "4", "--toml", f"{tmp_path}/none/t.toml"]) == 2
    assert "none/t.toml: No such file" in capsys.readouterr().err


def test_a_configuration_without_run_and_profile_is_told_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "torch.toml"
    path.write_text('run = "new"\n')
    assert main(["tune", str(path), "--gpus", "4"]) == 2
    assert "give a recorded run of this task" in capsys.readouterr().err
