"""RUN on the command line: first or last, a bare name in `runs/`, the newest run by default."""

from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.look.query.locate import locate_run, newest_run, run_path
from rollstream.run.cli.commands import choose_parser
from rollstream.run.cli.main import main, parse


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the run `runs/one`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "config.json").write_text('{"run": "one"}')
    return tmp_path


@pytest.mark.parametrize("run", ["runs/one", "one", "s3://bucket/prefix", "runs/missing"])
@pytest.mark.parametrize(
    ("command", "values"),
    [
        ("tail", {"topic": "ledger"}),
        ("query", {"sql": "SELECT a/b FROM steps"}),
        ("inspect", {"trajectory": "12.3"}),
        ("weights show", {"version": "latest"}),
        ("weights verify", {"version": "57"}),
        ("weights diff", {"first": "50", "second": "60"}),
        ("weights export", {"version": "57", "folder": "exported"}),
        ("checkpoints show", {"checkpoint": "s00000010-t0001"}),
    ],
)
def test_run_stands_first_last_or_nowhere(
    command: str, values: dict[str, str], run: str, here: Path
) -> None:
    def parsed(*words: str) -> dict[str, str | None]:
        found = vars(parse([*command.split(), *words]))
        return {name: found[name] for name in ("run", *values)}

    assert parsed(run, *values.values()) == {"run": run, **values}
    assert parsed(*values.values(), run) == {"run": run, **values}
    assert parsed(*values.values()) == {"run": None, **values}


def test_options_may_stand_between_the_arguments(here: Path) -> None:
    found = parse(["tail", "ledger", "--last", "5", "one", "--json"])
    assert (found.run, found.topic, found.last, found.json) == ("one", "ledger", 5, True)


def test_a_run_that_is_called_like_a_topic_stands_last(here: Path) -> None:
    (here / "runs" / "one").rename(here / "runs" / "ledger")
    found = parse(["tail", "ledger", "ledger"])
    assert (found.run, found.topic) == ("ledger", "ledger")


def test_a_mistyped_run_before_a_query_is_still_the_run(here: Path) -> None:
    sql = "SELECT count(*) FROM steps"
    for words in ([sql, "one"], ["one", sql]):
        assert (parse(["query", *words]).run, parse(["query", *words]).sql) == ("one", sql)
    found = parse(["query", "no-such-run", sql])
    assert (found.run, found.sql) == ("no-such-run", sql)


def test_query_still_takes_its_run_as_an_option(here: Path) -> None:
    found = parse(["query", "FROM steps", "--run", "one"])
    assert (found.run, found.sql) == ("one", "FROM steps")


def test_export_takes_its_folder_as_an_option(here: Path) -> None:
    found = parse(["weights", "export", "one", "57", "--out", "exported"])
    assert (found.run, found.version, found.out) == ("one", "57", "exported")


@pytest.mark.parametrize("command", ["weights", "checkpoints"])
def test_list_is_the_default_action(command: str, here: Path) -> None:
    for words in ([], ["one"], ["one", "--json"]):
        assert parse([command, *words]) == parse([command, "list", *words])


def test_a_bare_name_is_a_run_only_where_nothing_else_has_it(here: Path) -> None:
    assert run_path("one") == "runs/one"
    assert run_path("two") == "two"
    (here / "one").mkdir()
    assert run_path("one") == "one"


@pytest.mark.parametrize(
    "words",
    [
        ["top"], ["report"], ["audit"], ["inspect", "--last"], ["query", "FROM steps"],
        ["tail", "ledger"], ["weights"], ["checkpoints"], ["forward", "--to", "wandb"],
        ["fork", "--at", "latest", "--out", "x"], ["replay", "--to", "sqlite:x"],
    ],
)  # fmt: skip
def test_without_run_the_newest_one_is_taken(words: list[str], here: Path, capsys) -> None:
    parser, rest = choose_parser(words)
    arguments = parser.parse(rest)
    parser.find_runs(arguments)
    taken = vars(arguments).get("run") or arguments.runs[0]
    assert taken == "runs/one"
    assert "using the newest run, runs/one" in capsys.readouterr().err


def test_no_run_at_all_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["top"]) == 2
    assert "holds no run; name one" in capsys.readouterr().err


def test_the_folder_of_a_model_is_no_run(here: Path) -> None:
    """An exported version has a config.json, too."""
    model = here / "runs" / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Q"]}')
    found = parse(["weights", "export", "one", "57", "runs/model"])
    assert (found.run, found.version, found.folder) == ("one", "57", "runs/model")
    assert newest_run(here / "runs").name == "one"
    with pytest.raises(ConfigurationError, match="holds neither a run"):
        locate_run("runs/model")


def test_a_message_has_long_words_shortened_and_in_one_line(here: Path, capsys) -> None:
    assert main(["tail", "runs/one", "x" * 5000]) == 2
    assert len(capsys.readouterr().err) < 1000
    assert main(["top", "a\nb/c", "--once"]) == 2
    assert "a\\nb/c" in capsys.readouterr().err
