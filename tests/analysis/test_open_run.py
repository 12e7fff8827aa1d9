"""`rollstream.open_run`: Arrow tables and records for notebooks."""

import pytest

import rollstream
from rollstream.errors import ConfigurationError, DecodeError
from rollstream.streams.codec import decode, encode
from tests.analysis.asked_run import RUN, open_log


@pytest.fixture
def run(folder):
    with rollstream.open_run(str(folder)) as opened:
        yield opened


def test_an_answer_is_an_arrow_table(run):
    table = run.sql("SELECT step, reward_mean FROM steps")
    assert table.to_pydict() == {"step": [1, 2], "reward_mean": [0.5, 1.0]}
    assert run.table("groups").num_rows == 4
    assert set(run.views) >= {"trajectories", "spans", "steps", "lag", "rewards"}


def test_records_are_those_of_the_log_byte_by_byte(run, folders):
    bus, logged = open_log(folders["live"]), {}
    for message in bus.read("trajectories", bus.begin("trajectories")):
        try:
            record = decode(message.value or b"").record
        except DecodeError:
            continue
        logged.setdefault(record.trajectory, message.value)  # pyright: ignore[reportAttributeAccessIssue]
    bus.close()
    found = {record.trajectory: encode(record) for record in run.trajectories()}
    assert found == logged


def test_each_record_comes_once_and_where_chooses(run):
    names = [record.trajectory for record in run.trajectories()]
    assert len(names) == len(set(names)) == 7
    wanted = run.trajectories("reward > 0.5 AND rollout = 'rollout-0'")
    assert sorted(record.trajectory for record in wanted) == ["0.0", "2.0"]


def test_questions_may_be_asked_while_records_pass(run):
    seen = 0
    for record in run.trajectories("finish = 'stop'"):
        rows = run.sql(f"SELECT finish FROM completions WHERE trajectory = '{record.trajectory}'")
        assert rows.to_pydict() == {"finish": ["stop"]}
        seen += 1
    assert seen == 6


def test_tokens_are_text(run):
    record = run.trajectory("0.0")
    assert run.tokens_text(record) == "<bos>118%83>531=531<eos>"
    assert run.tokens_text("0.0") == run.prompt_text(record) + run.answer_text("0.0")


def test_the_configuration_is_there(run):
    assert run.configuration["run"] == RUN


def test_mistakes_are_reported(run, tmp_path):
    for ask in (
        lambda: run.sql("SELECT 1 FROM nowhere"),
        lambda: run.table("step"),
        lambda: list(run.trajectories("rewward > 1")),
        lambda: run.trajectory("9.9"),
        lambda: rollstream.open_run(str(tmp_path)),
        lambda: rollstream.open_run(str(tmp_path / "none")),
    ):
        with pytest.raises(ConfigurationError):
            ask()
