"""Whoever asks a run one question gets one number: report, live view, explorer, views, `ls` and
`audit` show equal numbers under one name, and no number is without a name.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from rollstream.streams.records import GroupClosed, StepDone, Superseded, Take
from rollstream.streams.values import GroupMembers, Version
from rollstream.streams.writer import FencedWriter
from testbed.recorded import RUN_OF_0_1_0, unpack
from testbed.two_pages.places import numbers_of_run
from testbed.two_pages.shown import ShownNumber, disagreements, numbers_of, unnamed
from tests.analysis.asked_run import admitted, make_run, members, open_log

WHY = "the learner failed 3 times on it"


def recorded(folder: Path) -> Path:
    """A killed run of release 0.1.0, in-flight, of eight steps."""
    unpack(RUN_OF_0_1_0, folder / "run")
    return folder / "run"


def superseded(folder: Path) -> Path:
    """A run with late rewards, a second completion, a repeated step and void records; of its groups
    one was poisoned and closed, one poisoned and not yet closed, and one begun by a take that was
    superseded and trained by a later one.
    """
    run = make_run(folder / "run")
    bus = open_log(run)
    dispatch = FencedWriter(bus, "admissions", "dispatch", 3)
    dispatch.open()
    dispatch.append([(str(group), admitted(group)) for group in (4, 5, 6)])
    trainer = FencedWriter(bus, "ledger", "trainer", 3)
    trainer.open()
    named = tuple(GroupMembers(group, ()) for group in (4, 5, 6))
    done = StepDone(3, Version(3, 3), "03", 1, {"reward_mean": 0.75}, {"trained": 2}, 1.7e9 + 3)
    trainer.append([
        ("run", Take(3, 0, 0, members(1), named)),
        ("run", Superseded(3, 0, (0,), (4, 5), WHY)),
        ("run", GroupClosed(4, "dead", f"poisoned: {WHY}", 3)),
        ("run", Take(3, 0, 1, (), ())),
        ("run", done),
    ])  # fmt: skip
    bus.close()
    return run


@pytest.mark.parametrize("made", [recorded, superseded])
def test_two_places_show_one_number(made: Callable[[Path], Path], tmp_path: Path) -> None:
    """If this fails: the figure's rule is in `run_rules`, its name in `rollstream/look/figures`."""
    shown = numbers_of_run(made(tmp_path))
    assert [fault.text() for fault in disagreements(shown)] == []
    assert unnamed(shown) == []
    compared = {one.figure for one in shown}
    assert {"run.seconds", "run.groups_trained", "rollout.tokens", "step.lag_tokens"} <= compared


def test_numbers_agree_within_their_printed_rounding() -> None:
    def shown(place: str, text: str) -> ShownNumber:
        ((number, rounding),) = numbers_of(text)
        return ShownNumber(place, "label", "run.seconds", "", number, rounding)

    exact = ShownNumber("json", "seconds", "run.seconds", "", 50.26)
    same = [shown("page", "0:50"), shown("text", "50.3 s"), shown("line", "50")]
    assert disagreements([exact, *same]) == []
    (apart,) = disagreements([exact, *same, shown("other", "50.4 s")])
    assert apart.second.place == "other"


def test_a_number_without_a_name_is_found() -> None:
    assert unnamed([ShownNumber("page", "new tile", "", "", 1.0)]) == ["page: new tile"]
