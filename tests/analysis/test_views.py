"""The rows of each view over a run with known counts, archived, live or half and half."""

import json
import shutil
from contextlib import ExitStack

import pyarrow.parquet as pq
import pytest

from rollstream.look.query.locate import locate_run
from rollstream.look.query.session import QuerySession
from rollstream.look.query.views import VIEWS
from rollstream.streams.records import Admitted, GroupClosed, Superseded, Take
from rollstream.streams.values import Address, GroupMembers, Member
from rollstream.streams.writer import FencedWriter, publish
from testbed.repository import EXAMPLES
from tests.analysis.asked_run import CONFIGURATION, archive, note, open_log


def rows_of(folder, sql):
    with QuerySession(locate_run(str(folder)), lambda text: None) as session:
        return rows(session, sql)


def rows(session, sql):
    return [row for batch in session.answer(sql).batches for row in batch]


@pytest.fixture(scope="module")
def sessions(folders):
    """A session of each state of the run."""
    with ExitStack() as opened:
        yield [
            opened.enter_context(QuerySession(locate_run(str(folder)), lambda text: None))
            for folder in folders.values()
        ]


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_the_same_however_much_is_archived(view, sessions):
    """Each row appears once: archived, or live where the archive does not reach."""
    live, half, whole, archived = (
        sorted(map(str, rows(session, f"FROM {view}"))) for session in sessions
    )
    assert live
    assert half == live
    assert whole == live
    assert archived == live


def test_a_topic_has_every_row_and_the_reason_of_each_wrong_one(asked):
    assert asked("SELECT count(*), count(schema), count(reason) FROM trajectories") == [(9, 8, 1)]
    assert asked("SELECT reason, original FROM trajectories WHERE reason IS NOT NULL") == [
        ("9 bytes are too few for a record", b"no record")
    ]
    assert asked("SELECT count(*) FROM ledger WHERE void") == [(2,)]


def test_the_first_completion_counts(asked):
    """Invariant 2."""
    assert asked("SELECT attempt, reward FROM trajectories WHERE trajectory = '0.0'") == [
        (1, 1.0),
        (2, 0.25),
    ]
    assert asked("SELECT attempt, reward FROM completions WHERE trajectory = '0.0'") == [(1, 1.0)]
    assert asked("SELECT count(*), count(DISTINCT trajectory) FROM completions") == [(7, 7)]


def test_a_reward_is_the_records_or_the_first_annotation(asked):
    rewards = asked("SELECT trajectory, reward, source FROM rewards ORDER BY trajectory")
    assert rewards == [
        ("0.0", 1.0, "record"),
        ("0.1", 0.0, "record"),
        ("1.0", 0.5, "annotation"),
        ("1.1", 0.75, "annotation"),
        ("2.0", 1.0, "record"),
        ("2.1", 1.0, "record"),
        ("3.0", None, None),
    ]


def test_a_scorer_that_gave_up_gives_the_reason(asked):
    assert asked("SELECT trajectory, value, reason FROM scores WHERE name = 'length'") == [
        ("1.1", None, "the scorer gave up")
    ]


@pytest.mark.parametrize(("is_by_part", "reward"), [(False, 0.25), (True, 0.75)])
def test_with_rewards_of_parts_the_reward_is_their_sum(is_by_part, reward, folders, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(folders["live"], folder)
    configuration = CONFIGURATION | {"trainer": {"process_rewards": is_by_part}}
    (folder / "config.json").write_text(json.dumps(configuration))
    bus = open_log(folder)
    publish(bus, "annotations", "0", note("0.0", "reward", [0.25, 0.5]))
    bus.close()
    assert rows_of(folder, "SELECT reward FROM rewards WHERE trajectory = '0.0'") == [(reward,)]


def test_every_group_has_one_ending(asked):
    """Invariant 1; the zombie's closing of group 99 is void (invariant 7)."""
    assert asked('SELECT "group", ended, detail, step FROM groups') == [
        (0, "trained", "", 1),
        (1, "trained", "", 2),
        (2, "filtered", "all rewards are 1", 2),
        (3, "open", None, None),
    ]


def test_a_group_with_redundancy_shows_what_it_needed_and_released(folders, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(folders["live"], folder)
    bus, names = open_log(folder), ("4.0", "4.1", "4.2")
    dispatch = FencedWriter(bus, "admissions", "dispatch", 3)
    dispatch.open()
    dispatch.append([("4", Admitted(4, 2, names, 600.0, Address(0, 4), needed=2))])
    trainer = FencedWriter(bus, "ledger", "trainer", 3)
    trainer.open()
    first = tuple(Member(name, Address(1, number), "00") for number, name in enumerate(names[:2]))
    trainer.append([("run", Take(3, 0, 0, first, (GroupMembers(4, first),)))])
    bus.close()
    groups = rows_of(folder, 'SELECT "group", trajectories, needed, released FROM groups')
    assert groups[0] == (0, 2, 2, 0)
    assert groups[-1] == (4, 3, 2, 1)


@pytest.mark.parametrize("state", ["live", "archive"])
def test_a_superseded_take_trained_nothing_and_its_poisoned_group_is_dead(folders, tmp_path, state):
    folder = tmp_path / "run"
    shutil.copytree(folders["live"], folder)
    bus, why = open_log(folder), "the learner failed 3 times on it"
    trainer = FencedWriter(bus, "ledger", "trainer", 3)
    trainer.open()
    closed = GroupClosed(1, "dead", f"poisoned: {why}", 2)
    trainer.append([("run", Superseded(2, 0, (0,), (1,), why)), ("run", closed)])
    bus.close()
    if state == "archive":
        archive(folder)
        shutil.rmtree(folder / "bus")
    assert rows_of(folder, "SELECT step, micro_batch FROM takes") == [(1, 0)]
    assert rows_of(folder, "SELECT DISTINCT step FROM trained") == [(1,)]
    ends = rows_of(folder, 'SELECT "group", ended, detail, step FROM groups')
    assert ends[:2] == [(0, "trained", "", 1), (1, "dead", f"poisoned: {why}", 2)]


def test_of_a_repeated_step_the_later_term_stands(asked):
    steps = asked("SELECT step, term, version, reward_mean, loss, metrics['of_term'] FROM steps")
    assert steps == [(1, 1, 1, 0.5, None, 1.0), (2, 2, 2, 1.0, None, 2.0)]


def test_trained_has_the_step_in_which_a_trajectory_was_used(asked):
    assert asked("SELECT trajectory, step, term FROM trained ORDER BY trajectory") == [
        ("0.0", 1, 1),
        ("0.1", 1, 1),
        ("1.0", 2, 2),
        ("1.1", 2, 2),
    ]
    assert asked("SELECT step, trajectories, groups FROM takes ORDER BY step") == [
        (1, 2, 1),
        (2, 2, 1),
    ]


def test_lag_is_counted_at_finish_and_at_consumption(asked):
    """Invariant 5: step s trains from version s - 1; max_lag is 1 here."""
    spans = asked(
        'SELECT trajectory, start, "end", version, lag_finish, lag_consumed, masked FROM spans '
        "WHERE trajectory IN ('0.0', '1.0', '2.0') ORDER BY trajectory, start"
    )
    assert spans == [
        ("0.0", 0, 9, 0, 1, 0, False),
        ("1.0", 0, 2, 0, 1, 1, False),
        ("1.0", 2, 9, 1, 0, 0, False),
        ("2.0", 0, 9, 1, 0, None, None),
    ]
    assert asked("FROM lag") == [(1, 0, 18, 2), (2, 0, 14, 2), (2, 1, 4, 2)]


def test_evaluations_are_lines_of_the_metrics_file_without_the_torn_one(asked):
    assert asked("SELECT step, accuracy_greedy, shares, line->>'dead' FROM evaluations") == [
        (0, 0.5, {"full": 1.0}, "0")
    ]


def test_tokens_are_text(asked):
    text = asked(
        "SELECT text_of(tokens), text_of(prompt_of(tokens, sources)), "
        "text_of(answer_of(tokens, sources)) FROM completions WHERE trajectory = '0.0'"
    )
    assert text == [("<bos>118%83>531=531<eos>", "<bos>118%83", ">531=531<eos>")]


def test_counting_reads_no_tokens(folders):
    """A projection reaches the files through the view, so unused columns are not read."""
    plan = rows_of(
        folders["archive"], "EXPLAIN SELECT task, avg(reward) FROM trajectories GROUP BY 1"
    )
    text = plan[0][1]
    assert "reward" in text
    assert "tokens" not in text
    assert "logprobs" not in text


def test_a_day_that_is_not_asked_for_is_not_opened(folders):
    sql = "EXPLAIN SELECT count(*) FROM trajectories WHERE date < DATE '2000-01-01'"
    (plan,) = rows_of(folders["archive"], sql)
    assert "EMPTY_RESULT" in plan[1] or "Scanning Files: 0/" in plan[1]


@pytest.mark.parametrize("columns", [["reference"], ["moves", "reference", "scores"]])
def test_columns_that_older_files_lack_are_null(columns, folders, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(folders["archive"], folder)
    for file in folder.glob("store/archive/topic=trajectories/*/*/*.parquet"):
        table = pq.read_table(file, partitioning=None).drop_columns(columns)
        with pq.ParquetWriter(file, table.schema) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata(
                _metadata_of(folders["archive"] / file.relative_to(folder))
            )
    assert rows_of(folder, "SELECT DISTINCT reference FROM trajectories") == [(None,)]
    sql = "SELECT reward, moves FROM rewards WHERE trajectory = '0.0'"
    assert rows_of(folder, sql) == [(1.0, None if "moves" in columns else 0)]
    assert rows_of(folder, "SELECT count(*) FROM trajectories") == [(9,)]


def _metadata_of(file):
    found = pq.read_metadata(file).metadata
    return {key: value for key, value in found.items() if key.startswith(b"rollstream.")}  # pyright: ignore[reportOptionalMemberAccess]


def test_drafts_are_counted_by_pass_over_the_prompt(asked):
    """Only drafted tokens count; groups 1 and 2 have the same prompt."""
    sql = (
        "SELECT pass, count(*), sum(tokens), sum(steps), sum(guessed), sum(accepted), sum(asked), "
        "sum(found) FROM drafts GROUP BY pass ORDER BY pass"
    )
    assert asked(sql) == [(1, 2, 18, 8, 16, 12, 6, 4), (2, 2, 18, 8, 16, 12, 6, 4)]
    assert asked('SELECT DISTINCT drafts.runs FROM trajectories WHERE "group" = 1') == [
        ([2, 4, 1, 2],)
    ]
    assert asked('SELECT count(*) FROM trajectories WHERE drafts IS NULL AND "group" = 0') == [(3,)]


def test_files_from_before_drafts_have_the_view_without_rows():
    """The shipped archive is older than the field; views made earlier are made again."""
    place = locate_run(str(EXAMPLES / "archive"))
    with QuerySession(place, lambda text: None) as session:

        def count(sql: str) -> int:
            return sum(len(rows) for rows in session.answer(sql).batches)

        completions = count("FROM completions")
        assert completions > 0
        assert count("FROM drafts") == 0
        assert count("FROM completions WHERE drafts IS NULL") == completions
