"""A scorer annotates the first completion of each living trajectory, and loses none of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import catalogue
from testbed.servers import kafka_broker
from testbed.waiting import WAIT_S, wait_for
from tests.scoring.scoring_samples import finished, is_caught_up, notes, post, running, scorer


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    one = open_bus(f"sqlite:{tmp_path / 'bus'}")
    one.create(catalogue(2))
    yield one
    one.close()


def test_the_tasks_own_judge_gives_late_rewards(bus: Bus):
    post(bus, finished("0.0"), finished("0.1", "=131"), finished("1.0", ">745=130"))
    with running(scorer(bus)):
        wait_for(lambda: len(notes(bus)) == 3)
    found = {note.trajectory: (note.name, note.values.tolist()) for note in notes(bus)}
    assert found == {
        "0.0": ("reward", [1.0]), "0.1": ("reward", [0.0]), "1.0": ("reward", [1.0])
    }  # fmt: skip
    assert {note.scorer for note in notes(bus)} == {"scorer-0"}


def test_the_judges_scores_can_be_annotations_too(bus: Bus):
    post(bus, finished("0.0"))
    with running(scorer(bus, names=("style/direct", "reward"))):
        wait_for(lambda: len(notes(bus)) == 2)
    assert {note.name: note.values.tolist() for note in notes(bus)} == {
        "style/direct": [1.0], "reward": [1.0]
    }  # fmt: skip


def test_a_function_gets_texts_and_facts_and_gives_numbers_by_name(bus: Bus):
    post(bus, finished("7.0", reference="right"))
    names = ("length", "group", "asked", "right")
    with running(scorer(bus, "tests.scoring.odd_scorers:facts", names)):
        wait_for(lambda: len(notes(bus)) == 4)
    assert {note.name: note.values.tolist() for note in notes(bus)} == {
        "length": [4.0], "group": [7.0], "asked": [1.0], "right": [1.0]
    }  # fmt: skip


def test_a_lone_number_is_the_first_name(bus: Bus):
    post(bus, finished("0.0"))
    with running(scorer(bus, "tests.scoring.odd_scorers:lone", ("quality", "other"))):
        wait_for(lambda: len(notes(bus)) == 2)
    quality, other = sorted(notes(bus), key=lambda note: note.name, reverse=True)
    assert (quality.name, quality.values.tolist(), quality.reason) == ("quality", [2.5], "")
    assert (other.values.tolist(), other.reason) == ([], "not among what was given (quality)")


def test_what_fails_is_annotated_with_its_reason_and_the_next_is_fine(bus: Bus, tmp_path: Path):
    kinds = ("raises", "exits", "text", "nan", "huge", "wide", "less", "hangs", "fine")
    hangs, now_s = tmp_path / "hangs", [0.0]
    words = {"hangs": f"hangs {hangs}"}
    questions = [finished(f"{n}.0", reference=words.get(k, k)) for n, k in enumerate(kinds)]
    post(bus, *questions[:-2])
    one = scorer(bus, "tests.scoring.odd_scorers:misbehaves", ("quality",), clock=lambda: now_s[0])
    with running(one):
        # Only what is asked before the clock jumps is late, and a process answers in the order of
        # the reads, which take the partitions in any order: so `hangs` is alone.
        wait_for(lambda: len(notes(bus)) == len(kinds) - 2)
        post(bus, questions[-2])
        wait_for(hangs.exists)
        now_s[0] = 2 * WAIT_S
        post(bus, questions[-1])
        wait_for(lambda: is_caught_up(bus))
    found = {kinds[note.group]: note for note in notes(bus)}
    assert {kind for kind, note in found.items() if not note.reason} == {"fine"}
    assert all(len(note.values) == 0 for kind, note in found.items() if kind != "fine")
    reasons = {kind: note.reason for kind, note in found.items()}
    assert "ZeroDivisionError at odd_scorers.py" in reasons["raises"]
    assert reasons["hangs"] == f"took longer than {WAIT_S:g} s"
    assert reasons["exits"] == "its process ended (exit code 9)"
    assert reasons["text"] == "the result is a str, not a number"
    assert reasons["nan"] == "the result is nan"
    assert reasons["huge"] == "1e+300 is not a 32-bit number"
    assert reasons["wide"] == "-2e+06 is beyond ±1e+06"
    assert reasons["less"] == "not among what was given (other)"


def test_only_the_first_completion_of_a_trajectory_is_scored_and_no_dead_one(bus: Bus):
    """Invariant 2: annotated and trained completions are the same."""
    post(bus, finished("0.0", "=130"), finished("0.0", "=999", attempt=2))
    post(bus, finished("0.1", finish="dead"), finished("0.1", attempt=2))
    with running(scorer(bus)):
        wait_for(lambda: is_caught_up(bus))
    assert [(note.trajectory, note.values.tolist()) for note in notes(bus)] == [("0.0", [1.0])]


def test_rubbish_in_the_topic_is_passed_over(bus: Bus):
    bus.append("trajectories", [AppendEntry(b"0", b"junk", 0), AppendEntry(b"0", None, 0)])
    post(bus, finished("0.0"))
    with running(scorer(bus)):
        wait_for(lambda: is_caught_up(bus))
    assert [note.trajectory for note in notes(bus)] == ["0.0"]


def test_a_scorer_that_ended_in_the_middle_of_a_batch_is_succeeded_on_it(bus: Bus, tmp_path: Path):
    """Nothing is committed before its annotations are in the log."""
    post(bus, finished("0.0", reference=str(tmp_path)))
    first = scorer(bus, "tests.scoring.odd_scorers:waits_for_file", name="first")
    with running(first):
        wait_for(lambda: (tmp_path / "began").exists())
    assert notes(bus) == []
    assert not is_caught_up(bus)
    (tmp_path / "end").touch()
    with running(scorer(bus, "tests.scoring.odd_scorers:waits_for_file", name="second")):
        wait_for(lambda: is_caught_up(bus))
    assert [(note.trajectory, note.scorer) for note in notes(bus)] == [("0.0", "second")]


def test_two_scorers_share_the_partitions(bus: Bus):
    names = [f"{group}.0" for group in range(40)]
    with running(scorer(bus, name="a")), running(scorer(bus, name="b")):
        for name in names:
            post(bus, finished(name))
        wait_for(lambda: is_caught_up(bus))
        wait_for(lambda: {note.trajectory for note in notes(bus)} == set(names))


def test_a_scorer_behind_a_truncation_continues_with_the_kept_records(bus: Bus):
    """Truncated records belong to groups that ended: their annotations are not needed."""
    post(bus, finished("0.0"))
    with running(scorer(bus)):
        wait_for(lambda: is_caught_up(bus))
    post(bus, finished("0.1"), finished("0.2"))
    end = bus.end("trajectories")
    bus.truncate("trajectories", {p: at - 1 for p, at in end.items() if at})
    with running(scorer(bus)):
        wait_for(lambda: is_caught_up(bus))
    assert [note.trajectory for note in notes(bus)] == ["0.0", "0.2"]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_two_scorers_over_kafka_survive_truncation_behind_them():
    """A commit from outside of the group is refused while another member lives: a scorer that ended
    for it would meet the truncation again at each restart.
    """
    url = kafka_broker.new_url()
    one, other = open_bus(url), open_bus(url)
    one.create(catalogue(2))
    try:
        post(one, *(finished(f"{group}.0") for group in range(6)))
        with running(scorer(one)):
            wait_for(lambda: is_caught_up(one))
        post(one, *(finished(f"{group}.1") for group in range(6)))
        post(one, *(finished(f"{group}.2") for group in range(6)))
        ends = one.end("trajectories")
        assert all(ends.values()), "both partitions hold some"
        one.truncate("trajectories", {p: at - 1 for p, at in ends.items()})
        with running(scorer(one)), running(scorer(other, name="scorer-1")):
            wait_for(lambda: is_caught_up(one))
        kept = {note.trajectory for note in notes(one)} - {f"{group}.0" for group in range(6)}
        assert len(kept) == 2
    finally:
        one.close()
        other.close()


def test_a_trajectory_that_has_a_reward_keeps_it(bus: Bus):
    """Whether its group waits for the scorer would decide which of the two counts."""
    post(bus, finished("0.0", reward=0.5), finished("1.0"))
    with running(scorer(bus, names=("style/direct", "reward"))):
        wait_for(lambda: len(notes(bus)) == 3 and is_caught_up(bus))
    found = sorted((note.trajectory, note.name) for note in notes(bus))
    assert found == [("0.0", "style/direct"), ("1.0", "reward"), ("1.0", "style/direct")]


def test_nothing_is_asked_about_a_trajectory_whose_only_annotation_would_be_its_reward(bus: Bus):
    post(bus, finished("0.0", reward=0.5))
    one = scorer(bus)
    with running(one):
        wait_for(lambda: is_caught_up(bus))
    assert not notes(bus)
    assert one.counts["scored"] == 0
