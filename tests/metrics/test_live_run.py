"""A real run scraped: names as documented, numbers as in the log, also across `kill -9`."""

import os
import re
import signal
import socket
from collections import Counter
from pathlib import Path

import pytest

from rollstream.run.metrics.catalogue import BY_ROLE, PREFIX
from rollstream.run.metrics.endpoint import endpoint_file
from rollstream.storage.metrics_file import read_metrics
from rollstream.streams.records import StepDone, Trajectory
from testbed.scraping import Series, endpoint, get, scrape, value
from testbed.servers import free_ports
from tests.metrics.live_run import records, started, wait_for_iteration

NAMES = {
    "prompts": "prompts",
    "dispatch": "dispatch",
    "train": "trainer",
    "rollout": "rollout-0",
    "eval": "eval",
    "score": "scorer-0",
    "archive": "archive",
    "supervisor": "supervisor",
    "relay": "relay",
}


LEASED = ("prompts", "dispatch", "train", "archive")
READING = ("prompts", "dispatch", "train", "rollout", "eval", "relay")


def scraped(folder: Path, role: str) -> Series:
    return scrape(endpoint(folder, NAMES[role])["url"])


def served_names(folder: Path, role: str) -> set[str]:
    """Family names without the suffixes of a histogram's series."""
    names = {n for n in scraped(folder, role) if n.startswith(PREFIX)}
    histograms = {n.removesuffix("_bucket") for n in names if n.endswith("_bucket")}
    parts = {f"{name}{part}" for name in histograms for part in ("_bucket", "_count", "_sum")}
    return {n.removeprefix(PREFIX) for n in (names - parts) | histograms}


def is_up(folder: Path) -> bool:
    return all(endpoint_file(folder, name).exists() for name in NAMES.values())


def has_evaluated(folder: Path) -> bool:
    return bool(read_metrics(folder / "metrics" / "eval.jsonl"))


def pid_of(folder: Path, name: str) -> int:
    return endpoint(folder, name)["pid"] if endpoint_file(folder, name).exists() else 0


@pytest.mark.slow
def test_every_role_serves_the_documented_names_and_the_numbers_of_the_log(
    tmp_path: Path, model: Path
):
    folder = tmp_path / "run"
    late = ("task.reward=late", "scoring.count=1", "archive.enabled=true", "relay.enabled=true")
    with started(folder, model, "trainer.steps=2000", *late) as run:
        run.wait_for(lambda: is_up(folder) and has_evaluated(folder))
        run.wait_for(lambda: len(records(folder, "ledger", StepDone)) >= 4)
        run.wait_for(lambda: "rollstream_run_step_age_seconds" in scraped(folder, "supervisor"))
        leased = {"lease_term", "lease_renewals_total"}
        over_kafka = {"log_follow_restarts_total", "log_follow_lost_total"}
        common = {family.name for family in BY_ROLE["every role"]} - over_kafka
        by_topic = {"bus_appended_bytes_total", "bus_read_bytes_total"}  # some only read or write
        metered = {name for name in common if name.startswith(("bus_", "store_"))}
        for role in NAMES:
            served = (*BY_ROLE[role], *(BY_ROLE["observe"] if role == "supervisor" else ()))
            own = {family.name for family in served if "_agent_" not in family.name}
            with_lease = leased if role in LEASED else set()
            reading = common - leased - metered if role in READING else set()
            least = {"role_turn_age_seconds", "interpreter_allocations", "scrape_errors_total"}
            least |= {"build_info", "role_running_since_seconds"}
            least |= set() if role == "supervisor" else metered
            wanted = own | with_lease | reading | least
            assert served_names(folder, role) - by_topic == wanted - by_topic, role
            assert value(scraped(folder, role), "rollstream_scrape_errors_total") == 0, role
            assert get(endpoint(folder, NAMES[role])["url"] + "/healthz")[0] == 200
            wait_for_iteration(run, NAMES[role])
        check_trainer(folder)
        check_rollout(folder)
        run.newest().stop(signal.SIGINT)
    assert list((folder / "metrics" / "endpoints").iterdir()) == []


def check_trainer(folder: Path) -> None:
    """Trained tokens are the sum over the `StepDone` records that the process counted."""
    found = scraped(folder, "train")
    steps = int(value(found, "rollstream_trainer_steps_total"))
    # A record is appended before it is counted, so no step of the page is missing here.
    done = records(folder, "ledger", StepDone)[:steps]
    assert len(done) == steps
    tokens = sum(d.metrics["tokens_trained"] for d in done)
    assert value(found, "rollstream_trainer_tokens_trained_total") == tokens
    assert value(found, "rollstream_lag_steps_count") == tokens
    assert value(found, "rollstream_trainer_groups_total", outcome="trained") == 4 * steps
    assert value(found, "rollstream_trainer_step_seconds_count") == steps
    assert value(found, "rollstream_lease_term") == 1
    assert value(found, "rollstream_bus_appended_bytes_total", topic="ledger") > 0
    assert value(found, "rollstream_bus_read_bytes_total", topic="trajectories") > 0
    assert value(found, "rollstream_store_seconds_count", operation="write") > 0


def check_rollout(folder: Path) -> None:
    found = scraped(folder, "rollout")
    finished = sum(v for _, v in found["rollstream_rollout_trajectories_total"])
    published = records(folder, "trajectories", Trajectory)
    assert 0 < finished <= len(published)
    assert value(found, "rollstream_rollout_slots") == 8
    held = value(found, "rollstream_rollout_version_held")
    assert 0 <= held <= value(found, "rollstream_rollout_version_newest")
    assert value(found, "rollstream_rollout_fetched_bytes_total") > 0
    assert value(found, "rollstream_reader_behind_records", topic="weights") >= 0


@pytest.mark.long
def test_killed_roles_come_back_with_a_new_endpoint_and_one_line_per_step(
    tmp_path: Path, model: Path
):
    folder, steps = tmp_path / "run", 14
    settings = (f"trainer.steps={steps}", "evaluation.enabled=false")
    with started(folder, model, *settings) as run:
        for least, name in ((2, "trainer"), (4, "rollout-0")):
            run.wait_for(lambda: len(records(folder, "ledger", StepDone)) >= least)  # noqa: B023
            run.wait_for(lambda: pid_of(folder, name) > 0)  # noqa: B023
            before = pid_of(folder, name)
            os.kill(before, signal.SIGKILL)
            run.wait_for(lambda: pid_of(folder, name) not in (0, before))  # noqa: B023
            assert get(endpoint(folder, name)["url"] + "/healthz")[0] == 200
            found = scraped(folder, "supervisor")
            assert value(found, "rollstream_supervisor_restarts_total", process=name) == 1
        run.wait_complete()
    lines = read_metrics(folder / "metrics" / "trainer.jsonl")
    assert Counter(line["step"] for line in lines) == Counter(range(1, steps + 1))
    done = {(d.step, d.time_s) for d in records(folder, "ledger", StepDone)}
    assert {(line["step"], line["time_s"]) for line in lines} == done


@pytest.mark.long
def test_a_base_port_gives_each_role_the_next_one_and_a_taken_one_does_no_harm(
    tmp_path: Path, model: Path
):
    folder, base = tmp_path / "run", free_ports(8)[0]
    settings = ("trainer.steps=3", "evaluation.enabled=false")
    with (
        socket.create_server(("127.0.0.1", base + 3)),  # the port of the third role, the trainer
        started(folder, model, *settings, ROLLSTREAM_METRICS_PORT=str(base)) as run,
    ):
        run.wait_for(lambda: endpoint_file(folder, "dispatch").exists())
        assert endpoint(folder, "supervisor")["port"] == base
        assert endpoint(folder, "dispatch")["port"] == base + 2
        run.wait_complete()
    log = (folder / "logs" / "trainer.log").read_text()
    assert re.search(rf"no metrics: 127\.0\.0\.1 port {base + 3} is unavailable", log)
    assert len(records(folder, "ledger", StepDone)) == 3
