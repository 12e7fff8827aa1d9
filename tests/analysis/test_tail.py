"""`rollstream tail`: records in words, filters on their fields, following until Ctrl-C."""

import json
import signal
import subprocess
import sys

import pytest

from rollstream.errors import ConfigurationError
from rollstream.look.query.describe import describe
from rollstream.look.query.fields import parse_condition
from rollstream.run.cli.main import main
from rollstream.streams.codec import decode
from rollstream.streams.records import TOPIC_RECORDS
from rollstream.streams.topics import DEAD
from rollstream.streams.writer import publish
from testbed.repository import ROOT
from testbed.sample_records import SAMPLES
from testbed.waiting import WAIT_S
from tests.analysis.asked_run import archive, make_run, note, open_log


def tail(capsys, *words):
    assert main(["tail", *map(str, words)]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if "(UTC)" not in line]


@pytest.mark.parametrize("record", SAMPLES, ids=lambda record: record.schema())
def test_every_kind_of_record_has_a_line(record):
    line = describe(record)
    assert "\n" not in line
    assert type(record).__name__ not in line


def test_records_are_described_as_they_pass(folder, capsys):
    lines = tail(capsys, "trajectories", folder, "--from", "begin", "--where", "group<=1")
    assert len(lines) == 5
    assert lines[0].endswith(
        "0.0 of remainder: stop, reward 1, 9 tokens (v0 9) by rollout-0/1 in 2.50 s"
    )
    assert lines[2].endswith("by rollout-0/1 in 2.50 s, 1 moves")


def test_void_records_and_bytes_that_are_no_record_are_marked(folder, capsys):
    lines = tail(capsys, "trajectories", folder, "--from", "begin")
    (odd,) = [line for line in lines if "not a record: 9 bytes are too few" in line]
    assert odd.endswith(", key 3")  # the key often names the program that wrote it
    void = [line for line in tail(capsys, "ledger", folder, "--from", "begin") if "void" in line]
    assert [line.split("  ")[-1] for line in void] == [
        "group 99 dead at step 1: never written (void)",
        "step 2 done in 1 takes, reward_mean 1 (void)",
    ]


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("reward>=1", {"0.0", "2.0", "2.1"}),
        ("reward=null", {"1.0", "1.1", "3.0"}),
        ("rollout!=rollout-0", {"0.1", "1.1", "2.1"}),
        ("tokens<5", {"3.0"}),
        ("spans.1.version.number=1", {"1.0", "1.1"}),
        ("trainer_version.number>1", set()),
        ("scores.style/full=1", {"0.0", "0.1", "1.0", "1.1", "2.0", "2.1"}),
        ("scores.full=1", set()),
        ("reason~room", {"3.0"}),
        ("finish=dead", {"3.0"}),
        ("void=false", {"0.0", "0.1", "1.0", "1.1", "2.0", "2.1", "3.0"}),
        ("schema=trajectory", {"0.0", "0.1", "1.0", "1.1", "2.0", "2.1", "3.0"}),
    ],
)
def test_records_are_chosen_by_their_fields(where, found, folder, capsys):
    words = ["trajectories", folder, "--from", "begin", "--json"]
    lines = [json.loads(line) for line in tail(capsys, *words, "--where", where)]
    assert {line["trajectory"] for line in lines if "trajectory" in line} == found


def test_the_last_few_are_the_last_few_that_match(folder, capsys):
    (line,) = tail(capsys, "ledger", folder, "--last", 1, "--where", "schema=take", "--json")
    assert json.loads(line)["step"] == 2


def test_json_has_every_field_with_its_place(folders, capsys):
    (line,) = tail(capsys, "annotations", folders["live"], "--where", "name=length", "--json")
    assert json.loads(line) | {"offset": 0, "partition": 0} == {
        "topic": "annotations", "timestamp_ms": 1_700_000_100_000, "partition": 0, "offset": 0,
        "key": "1", "term": None, "void": False, "schema": "annotation/1", "trajectory": "1.1",
        "group": 1, "name": "length", "values": [], "scorer": "judge",
        "reason": "the scorer gave up",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trajectorie"], "no topic 'trajectorie'; did you mean 'trajectories'?"),
        (["ledger", "--where", "stepp=1"], "ledger has no field stepp; did you mean 'step'?"),
        (["ledger", "--where", "version.nr=1"], "did you mean 'version.number'?"),
        (["ledger", "--where", "step=one"], "step is a number, but 'one' is not"),
        (["ledger", "--where", "step"], "write FIELD=VALUE"),
        (["ledger", "--from", "middle"], "write begin, end or an offset"),
        (["ledger", "--from", "3", "--last", "2"], "give one of them"),
        (["ledger", "--last", "0"], "--last must be ≥ 1, got 0"),
        (["ledger", "--partition", "7"], "ledger has no partition 7; it has only 0"),
    ],
)
def test_a_mistake_is_reported_with_what_to_write(words, expected, folders, capsys):
    topic, *options = words
    assert main(["tail", topic, str(folders["live"]), *options]) == 2
    assert expected in capsys.readouterr().err


def test_an_archive_has_no_status_to_tail(folders, capsys):
    assert main(["tail", "status", str(folders["archive"])]) == 2
    assert "status is not archived" in capsys.readouterr().err


def test_the_fields_of_every_topic_are_those_of_its_records():
    for topic, classes in TOPIC_RECORDS.items():
        for name in classes[0].__struct_fields__:
            assert parse_condition(f"{name}=null", topic).path == (name,)
    with pytest.raises(ConfigurationError):
        parse_condition("reward.x=1", "trajectories")


def test_following_shows_what_comes_and_ends_at_ctrl_c(tmp_path):
    folder = make_run(tmp_path / "run")
    words = ["tail", "annotations", str(folder), "--from", "end", "--follow", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rollstream", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    bus = open_log(folder)
    assert process.stdout is not None
    try:
        while process.poll() is None:  # records published before the end is found are skipped
            publish(bus, "annotations", "1", note("1.0", "late", [2.0]))
            line = _line_within(process, 1.0)
            if line:
                break
        assert json.loads(line)["name"] == "late"  # pyright: ignore[reportPossiblyUnboundVariable]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
        bus.close()
    assert process.returncode == 0


def _line_within(process, seconds):
    import select

    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else ""


def test_a_reader_that_goes_away_is_no_error(folders):
    command = f"{sys.executable} -m rollstream tail trajectories {folders['live']} --from begin"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | true"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.returncode in (0, 141)


def test_asking_changes_nothing(tmp_path):
    """It creates no consumer group, dead letter or topic: the log's files hold the same rows
    afterwards.
    """
    folder = make_run(tmp_path / "run")
    archive(folder)
    bus = open_log(folder)
    before = {t: bus.end(t) for t in (*TOPIC_RECORDS, DEAD)}
    for topic in TOPIC_RECORDS:
        main(["tail", topic, str(folder), "--from", "begin"])
    main(["query", "FROM groups", "--run", str(folder)])
    assert {t: bus.end(t) for t in before} == before
    assert bus.committed("tail", "trajectories") == {}
    bus.close()


def test_any_record_of_the_log_is_described(folders):
    """Every record of the log can be printed."""
    bus = open_log(folders["live"])
    for topic in TOPIC_RECORDS:
        begin = bus.begin(topic)
        for message in bus.read(topic, begin):
            if message.value and message.value.startswith(b"RSR1"):
                assert describe(decode(message.value).record)
    bus.close()
