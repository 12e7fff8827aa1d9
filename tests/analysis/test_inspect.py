"""`rollstream inspect`: all information on one trajectory."""

import json

import pytest

from rollstream.run.cli.main import main


def inspect(capsys, *words):
    assert main(["inspect", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_trajectory_is_shown_with_its_history(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    output = inspect(capsys, "1.0", folder)
    lines = [line.rstrip() for line in output.splitlines()]
    assert lines[0] == "trajectory 1.0"
    for expected in (
        "finish       stop, 9 tokens generated",
        "reward       0.5, from its annotation",
        "scores       style/full 1",
        "where        rollout-0 term 1, attempt 1, 0 moves",
        "annotations  reward 0.5, by judge",
        "versions     version 0 term 1: tokens 0 to 2, lag 1 at finish, 1 when trained",
        "             version 1 term 1: tokens 2 to 9, lag 0 at finish, 0 when trained",
    ):
        assert expected in lines
    assert any(
        line.startswith("trained      step 2, update 0, micro-batch 0, term 2;") for line in lines
    )
    assert any(
        line.startswith("group        group 1 of wave 0, 2 trajectories: trained") for line in lines
    )
    assert lines[-1] == "⟨prompt⟩<bos>118%83⟨v0⟩>5⟨v1⟩31=531<eos>"


def test_moves_and_assignments_are_shown_while_the_log_keeps_them(folders, capsys):
    output = inspect(capsys, "0.0", folders["live"])
    assert "attempt 1: start on rollout-0 term 1 under version 0" in output
    assert "attempt 2: resume on rollout-0 term 1 under version 0 from partial 0:0" in output
    assert "attempt 1: tokens 7 to 10 by rollout-0 term 1" in output
    assert "1 later ones ignored" in output


def test_every_token_has_its_probability(folder, capsys):
    output = inspect(capsys, "0.0", folder, "--logprobs")
    rows = [line.split("\t") for line in output.splitlines() if line.count("\t") == 5][1:]
    assert len(rows) == 16
    assert rows[7] == ["7", "16", "-3.0000", "0.0498", "v0", ">"]
    assert rows[0] == ["0", "1", "", "", "prompt", "<bos>"]


def test_a_program_reads_the_same(folder, capsys):
    reported = json.loads(inspect(capsys, "1.1", folder, "--json"))
    assert reported["reward"]["reward"] == 0.75
    assert [span["version"] for span in reported["spans"]] == [0, 1]
    assert reported["record"]["pieces"][:2] == ["<bos>", "1"]
    assert len(reported["record"]["tokens"]) == len(reported["record"]["sources"]) == 16
    assert reported["trained"][0]["step"] == 2
    assert reported["group"]["ended"] == "trained"
    assert [note["name"] for note in reported["annotations"]] == ["length", "reward"]


def test_a_group_a_beginning_and_the_last_are_found(folder, capsys):
    lines = inspect(capsys, "--group", 2, folder, "--json").splitlines()
    assert [json.loads(line)["trajectory"] for line in lines] == ["2.0", "2.1"]
    assert all(json.loads(line)["group"]["detail"] == "all rewards are 1" for line in lines)
    (last,) = inspect(capsys, "--last", folder, "--json").splitlines()
    assert json.loads(last)["record"] is not None


def test_a_dead_trajectory_and_an_unfinished_one_are_marked(folder, capsys):
    assert "dead: no room, 0 tokens generated" in inspect(capsys, "3.0", folder)
    output = inspect(capsys, "3.1", folder)
    assert "not finished" in output
    assert "group 3 of wave 1, 2 trajectories: open" in output


def test_without_a_tokenizer_tokens_are_numbers(folders, capsys):
    output = inspect(capsys, "0.0", folders["archive"] / "store")
    assert "no tokenizer was found, so tokens are numbers" in " ".join(output.split())
    assert "⟨prompt⟩1 5 5 12 14 12 7 ⟨v0⟩16" in output


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["9.9"], "no trajectory is called '9.9'"),
        (["1."], "'1.' begins several names: 1.0, 1.1"),
        (["--group", "77"], "no group 77 was admitted"),
        (["--group", "1", "--last"], "one of them"),
    ],
)
def test_a_mistake_is_reported(words, output, folders, capsys):
    name = [] if words[0].startswith("--") else [words.pop(0)]
    assert main(["inspect", *name, str(folders["archive"]), *words]) == 2
    assert output in capsys.readouterr().err


def test_accepted_drafts_are_marked(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    output = inspect(capsys, "1.0", folder, "--logprobs")
    assert (
        "drafts       6 of 8 draft tokens accepted, 9 tokens in 4 steps; 2 of 3 look-ups found a "
        "draft, 10 µs each" in output
    )
    assert "accepted draft" in output
    rows = [line.split("\t") for line in output.splitlines() if line.count("\t") == 6][1:]
    assert [row[5].strip() for row in rows[7:]] == ["", "", *"✓✓✓✓", "", *"✓✓"]
    assert {row[5].strip() for row in rows[:7]} == {""}
    assert "accepted draft" not in inspect(capsys, "0.0", folder, "--logprobs")
    reported = json.loads(inspect(capsys, "1.0", folder, "--json"))
    assert reported["record"]["drafts"]["runs"] == [2, 4, 1, 2]
