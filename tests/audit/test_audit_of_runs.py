"""Runs of the product audit clean under every history, and a recount that shares no code with it
agrees: from SQLite, from the archive, from a real Kafka.
"""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.archive.service import ArchiveService
from rollstream.consumers.settings import ArchiveSettings, TrainerSettings
from rollstream.producers.settings import RolloutSettings
from rollstream.run.cli.main import main
from rollstream.streams.bus import AppendEntry
from rollstream.streams.connect import open_bus
from rollstream.streams.records import StepDone
from rollstream.streams.topics import catalogue
from testbed.recount import places_of, recount
from testbed.servers.kafka_broker import new_url
from testbed.waiting import WAIT_S, wait_for
from tests.support.tiny_run import DISPATCH, TinyRun, tiny_run

COPIED = ("admissions", "ledger", "trajectories", "annotations", "applied", "prompts")


def configure(folder: Path, on_update: str = "in_flight", bus: str = "sqlite:bus") -> None:
    """The settings of a run that `audit` reads."""
    settings = {
        "run": "tiny", "bus": bus, "store": "file:store",
        "dispatch": {"max_lag": DISPATCH.max_lag}, "rollouts": {"on_update": on_update},
        "trainer": TrainerSettings().model_dump(mode="json"),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))


def audit(place: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and output of `--json`."""
    capsys.readouterr()
    code = main(["audit", str(place), "--json"])
    return code, json.loads(capsys.readouterr().out)


def counts(report: dict[str, Any], invariant: int) -> dict[str, int]:
    (line,) = [one for one in report["invariants"] if one["invariant"] == invariant]
    return line["counts"]


def assert_equal(report: dict[str, Any], counted: dict[str, Any]) -> None:
    """Audit and recount agree."""
    groups, once, lag = (counts(report, number) for number in (1, 2, 5))
    names = ("admitted", "trained", "filtered", "expired", "dead", "open")
    assert {name: counted["groups"][name] for name in names} == {n: groups[n] for n in names}
    assert counted["steps"] == groups["steps"]
    assert counted["trajectories"]["trained"] == once["trained"]
    assert counted["trajectories"]["completed"] == once["completed"]
    assert counted["trajectories"]["duplicates"] == once.get("duplicates", 0)
    assert counted["tokens"]["generated"] == counts(report, 3)["tokens"]
    assert counted["tokens"]["trained"] == lag["tokens trained"]
    assert counted["tokens"]["masked"] == lag["masked"]


def assert_nothing_twice(counted: dict[str, Any]) -> None:
    assert counted["trajectories"]["trained"] > 0
    assert counted["trajectories"]["trained_twice"] == counted["groups"]["ended_twice"] == 0
    assert counted["trajectories"]["not_the_first"] == counted["trajectories"]["not_found"] == 0
    assert counted["groups"]["never_admitted"] == counted["gaps"] == 0


def train_until(run: TinyRun, term: int, steps: int) -> None:
    """A trainer that ends in the middle of the step after these."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: run.train(term, stop), daemon=True)
    thread.start()
    wait_for(lambda: len(run.records("ledger", StepDone)) >= steps)
    stop.set()
    thread.join(WAIT_S)


def archive(run: TinyRun) -> None:
    """Archives everything up to the present ends."""
    stop = threading.Event()
    stop.set()
    ArchiveService(run.bus, run.store, "tiny", ArchiveSettings()).run(stop)


@pytest.mark.parametrize("on_update", ["in_flight", "keep_version"])
def test_a_run_audits_clean_and_its_recount_agrees(tmp_path, capsys, on_update) -> None:
    rollout = RolloutSettings(slots=8, context_max=64, status_s=0.1, on_update=on_update)
    configure(tmp_path, on_update)
    with tiny_run(tmp_path, rollout=rollout) as run:
        run.start_all()
        assert run.train()
        run.end()
        code, report = audit(tmp_path, capsys)
    assert (code, report["violations"], report["checked_whole"]) == (0, 0, True), report
    assert counts(report, 1)["trained"] == 12
    assert counts(report, 6)["files"] > 0
    counted = recount(places_of(str(tmp_path)))
    assert_equal(report, counted)
    assert_nothing_twice(counted)


def test_a_living_run_whose_trainer_was_replaced_audits_clean(tmp_path, capsys) -> None:
    """It also stops in the middle of a step, with groups open and a version in preparation."""
    configure(tmp_path)
    with tiny_run(tmp_path, trainer={"steps": 6}, checkpoint_every=2) as run:
        run.start_all()
        train_until(run, term=1, steps=3)
        code, report = audit(tmp_path, capsys)
        assert (code, report["violations"]) == (0, 0), report
        assert run.train(term=2)
        run.end()
        code, report = audit(tmp_path, capsys)
    assert (code, report["violations"]) == (0, 0), report
    assert counts(report, 1)["steps"] == 6
    assert counts(report, 7)["is the highest term"] == 2
    counted = recount(places_of(str(tmp_path)))
    assert_equal(report, counted)
    assert_nothing_twice(counted)


def test_an_archive_alone_reports_what_it_cannot_check(tmp_path, capsys) -> None:
    """Without log, weights and configuration the counts are the same, and the missing parts are
    reported.
    """
    configure(tmp_path)
    with tiny_run(tmp_path) as run:
        run.start_all()
        assert run.train()
        run.end()
        archive(run)
        _, whole = audit(tmp_path, capsys)
    shutil.rmtree(tmp_path / "bus")
    shutil.rmtree(tmp_path / "store" / "weights")
    code, report = audit(tmp_path, capsys)
    assert (code, report["violations"], report["checked_whole"]) == (2, 0, False)
    assert_equal(report, recount(places_of(str(tmp_path))))
    assert counts(report, 1) == counts(whole, 1)
    unchecked = [what for line in report["invariants"] for what in line["unchecked"]]
    assert "the store holds no weights/" in unchecked
    assert "prompts is missing" in unchecked
    (tmp_path / "config.json").unlink()
    code, report = audit(tmp_path / "store", capsys)
    unchecked = [what for line in report["invariants"] for what in line["unchecked"]]
    assert (code, report["run"]) == (2, "tiny")
    assert "dispatch.max_lag is not known without the run's config.json" in unchecked


@pytest.mark.parametrize("archived", [True, False])
def test_a_truncated_run_is_whole_with_its_archive_only(tmp_path, capsys, archived) -> None:
    """Invariant 11: truncated records are archived, or reported as lost."""
    dispatch = DISPATCH.model_copy(update={"keep_s": 0.05})
    configure(tmp_path)
    with tiny_run(
        tmp_path, trainer={"steps": 8}, checkpoint_every=2, dispatch=dispatch, truncate=not archived
    ) as run:
        run.start_all()
        assert run.train()
        run.end()
        if archived:
            archive(run)
            for topic in ("admissions", "trajectories", "ledger"):
                end = run.bus.end(topic).items()
                run.bus.truncate(topic, {partition: at * 2 // 3 for partition, at in end})
        code, report = audit(tmp_path, capsys)
    assert report["violations"] == 0, report
    assert code == (0 if archived else 2)
    assert report["topics"]["ledger"] == ("whole" if archived else "part")
    if archived:
        counted = recount(places_of(str(tmp_path)))
        assert_equal(report, counted)
        assert_nothing_twice(counted)


def test_a_log_in_kafka_is_audited_and_recounted(tmp_path, capsys) -> None:
    """The same records on a real broker give the same counts."""
    configure(tmp_path)
    url = new_url()
    with tiny_run(tmp_path) as run:
        run.start_all()
        assert run.train()
        run.end()
        kafka = open_bus(url)
        kafka.create(catalogue(2))
        for topic in COPIED:
            for partition, end in run.bus.end(topic).items():
                read = run.bus.read(topic, {partition: 0}, records_max=end or 1)
                entries = [AppendEntry(m.key, m.value, partition) for m in read if m.offset < end]
                if entries:
                    kafka.append(topic, entries)
        kafka.close()
    embedded = recount(places_of(str(tmp_path)))
    configure(tmp_path, bus=url)
    code, report = audit(tmp_path, capsys)
    assert report["violations"] == 0, report
    assert code == 0
    counted = recount(places_of(str(tmp_path)))
    assert counted == embedded
    assert_equal(report, counted)
    assert_nothing_twice(counted)


def test_the_recount_runs_as_a_program(folder: Path) -> None:
    line = [sys.executable, "-m", "testbed.recount", str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    counted = json.loads(done.stdout)
    assert counted["groups"]["admitted"] == 9
    assert counted["trajectories"]["duplicates"] == 1
