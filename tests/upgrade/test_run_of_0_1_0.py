"""A run of release 0.1.0 is resumed, queried, audited and replayed by this one (invariant 14)."""

import json
import threading
from pathlib import Path

import pytest

from rollstream.look.index.audit_policy import audit_policy
from rollstream.look.query.locate import locate_run
from rollstream.run.cli.main import main
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import open_run_log_for_writing
from rollstream.run.roles.context import RoleLaunch
from rollstream.run.roles.roles import run_role
from rollstream.streams.reader import TopicReader
from rollstream.streams.records import Configured, Opened, Position, Record
from rollstream.streams.release import RELEASE
from testbed.recorded import RUN_OF_0_1_0, unpack
from testbed.run_driver import RunDriver
from testbed.waiting import WAIT_S


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    unpack(RUN_OF_0_1_0, tmp_path / "run")
    return tmp_path / "run"


def test_it_is_queried(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "SELECT schema, count(*) AS n FROM ledger GROUP BY ALL ORDER BY ALL"
    assert main(["query", asked, "--run", str(folder), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["schema"], line["n"]) for line in lines] == [
        ("configured/1", 1), ("opened/1", 1), ("step_done/1", 7), ("take/1", 8),
    ]  # fmt: skip


def test_it_is_audited(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(folder)]) == 0, capsys.readouterr().out


def test_its_settings_give_the_rule_by_which_its_groups_were_judged(folder: Path) -> None:
    """A setting that 0.1.0 did not have yet must not cost the audit the rule."""
    rule = audit_policy(locate_run(str(folder))).rule
    assert rule is not None
    assert (rule.advantage, rule.masks_overlong, rule.overlong_penalty) == ("grpo", False, None)


def test_it_is_replayed_to_the_same_bits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--from-step", "3", "--to-step", "7", "--out", str(folder.parent / "again"), "--json"]
    assert main(["replay", str(folder), *line]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["compared"], reported["differing"]) == (4, [])


def test_it_is_looked_at(folder: Path) -> None:
    assert main(["report", str(folder)]) == 0
    assert main(["top", str(folder), "--once"]) == 0


def test_its_trainer_resumes_under_a_term_of_this_release(folder: Path) -> None:
    """Checkpoint, ledger and pointer of 0.1.0 are read, and the settings' old hash is the run's."""
    configuration, stop = load(folder / "config.json", (), {}), threading.Event()
    bus = open_run_log_for_writing(configuration, folder)
    reader = TopicReader(bus, "ledger", {0: Position(bus.end("ledger")[0])}, with_opened=True)
    launch = RoleLaunch(
        role="train",
        configuration=configuration,
        folder=folder,
        name="trainer",
        nonce="n",
        stop=stop,
    )
    thread = threading.Thread(target=run_role, args=(launch,), daemon=True)
    thread.start()
    found: list[Record] = []
    while not any(isinstance(one, Configured) for one in found) and thread.is_alive():
        found += [received.record for received in reader.poll(0.5)]
    stop.set()
    thread.join(WAIT_S)
    bus.close()
    assert [one.release for one in found if isinstance(one, Opened)] == [RELEASE]
    (configured,) = [one for one in found if isinstance(one, Configured)]
    assert configured.resumed_from == 6
    assert configured.run_id
    assert not configured.accepted


@pytest.mark.slow
def test_the_whole_run_resumes_to_its_last_step(folder: Path) -> None:
    with RunDriver(folder) as run:
        run.start()
        run.wait_complete()
    assert main(["audit", str(folder)]) == 0
