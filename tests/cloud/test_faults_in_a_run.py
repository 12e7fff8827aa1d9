"""Faults of the broker and of the bucket in the middle of a run: it continues and ends by itself,
the counts of invariant 1 add up, and no acknowledged record is lost.
"""

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollstream.storage.metrics_file import read_metrics
from rollstream.storage.stores.connect import open_store
from rollstream.streams.connect import open_bus
from testbed.run_driver import HERE, RunDriver
from testbed.run_process import STEPS, assert_the_log_adds_up, started
from testbed.servers import versity
from testbed.servers.fault_proxy import FOREVER, Fault, FaultProxy
from testbed.servers.kafka_broker import KafkaBroker
from testbed.waiting import let_pass
from tests.cloud.witness import Witness

DOWN_S = 10.0
PAUSE_S = 8.0
BURST = 40  # requests in a row
LEASES = ["trainer.lease_s=3", "dispatch.lease_s=3"]  # shorter than an outage


@dataclass
class Scene:
    """The processes that a fault may act on."""

    broker: KafkaBroker
    proxy: FaultProxy
    run: RunDriver


def broker_killed(scene: Scene) -> None:
    scene.broker.kill()
    let_pass(2)
    scene.broker.start()
    scene.broker.wait_ready()


def broker_paused(scene: Scene) -> None:
    scene.broker.signal(signal.SIGSTOP)
    let_pass(PAUSE_S)
    scene.broker.signal(signal.SIGCONT)


def errors(scene: Scene) -> None:
    scene.proxy.inject(Fault("status", 500, count=BURST), Fault("status", 503, count=BURST))


def done_but_reported_as_failed(scene: Scene) -> None:
    """All of these writes took effect."""
    scene.proxy.inject(Fault("status_after", 500, "PUT", count=BURST))


def slow(scene: Scene) -> None:
    scene.proxy.inject(Fault("drip", 1.0, "GET", count=BURST), Fault("delay", 0.5, count=BURST))


def cut_off(scene: Scene) -> None:
    half = BURST // 2
    scene.proxy.inject(Fault("truncate", 0.5, "GET", count=half))
    scene.proxy.inject(Fault("shorten", 0.5, "GET", count=half))


def resets(scene: Scene) -> None:
    scene.proxy.inject(Fault("reset", count=BURST), Fault("reset_after", count=BURST))


def outage(scene: Scene) -> None:
    scene.proxy.inject(Fault("reset", count=FOREVER))
    let_pass(DOWN_S)
    scene.proxy.clear()


def outage_in_which_the_trainer_dies(scene: Scene) -> None:
    scene.proxy.inject(Fault("status", 503, count=FOREVER))
    let_pass(DOWN_S / 3)
    scene.run.role("trainer").kill()
    let_pass(DOWN_S)
    scene.proxy.clear()


def both_down(scene: Scene) -> None:
    scene.proxy.inject(Fault("reset", count=FOREVER))
    broker_killed(scene)
    let_pass(DOWN_S / 2)
    scene.proxy.clear()


FAULTS = [
    pytest.param(faults, id=faults[0].__name__, marks=mark)
    for faults, mark in [
        ((broker_killed,), pytest.mark.slow),
        ((broker_paused,), pytest.mark.long),
        ((errors, done_but_reported_as_failed), pytest.mark.long),
        ((slow, cut_off), pytest.mark.long),
        ((resets,), pytest.mark.long),
        ((outage,), pytest.mark.long),
        ((outage_in_which_the_trainer_dies,), pytest.mark.long),
        ((both_down,), pytest.mark.long),
    ]
]


def asked(*line: str) -> list[dict]:
    """The JSON lines that a command prints about the run."""
    return [json.loads(text) for text in HERE.run(*line, "--json").stdout.splitlines()]


def assert_commands_read_everything_from_there(folder: Path) -> None:
    """Neither log nor store is in the folder."""
    assert not (folder / "bus").exists()
    assert not (folder / "store").exists()
    assert (folder / "report.html").stat().st_size > 10_000
    run = str(folder)
    assert asked("query", "SELECT max(step) AS last FROM steps", "--run", run) == [{"last": STEPS}]
    assert asked("tail", "ledger", run, "--last", "1")[0]["step"] == STEPS
    assert asked("inspect", "--last", run)[0]["trajectory"]
    assert asked("top", run, "--once")[0]["step"] == STEPS


@pytest.mark.parametrize("faults", FAULTS)
def test_a_run_continues_by_itself_and_nothing_acknowledged_is_lost(
    tmp_path: Path,
    model: Path,
    broker: KafkaBroker,
    proxy: FaultProxy,
    faults: Sequence[Callable[[Scene], None]],
) -> None:
    """Promise 1 with failing servers."""
    folder = tmp_path / "run"
    bus = f"kafka://{broker.server}/{faults[0].__name__.replace('_', '-')}"
    store = versity.new_url().replace(versity.server().endpoint, proxy.endpoint)
    witness = Witness(open_bus(bus), open_store(store))
    settings = [f"bus={bus}", f"store={store}", *LEASES]
    with witness, started(folder, model, settings) as run:
        run.wait_for_step(3)
        for fault in faults:
            fault(Scene(broker, proxy, run))
        assert run.step() < STEPS, "the run ended before the fault did"
        run.wait_complete()
    assert_the_log_adds_up(folder)
    witness.assert_nothing_is_lost()
    if faults[0] is broker_killed:
        assert_commands_read_everything_from_there(folder)
    assert proxy.injected or faults[0] in (broker_killed, broker_paused)
    print(  # shown by pytest -s
        f"{faults[0].__name__}: {proxy.injected} requests hit, {deaths(folder)} roles died, "
        f"the witness had acknowledgements of {len(witness.appended)} records "
        f"and {len(witness.created)} objects"
    )


def deaths(folder: Path) -> int:
    events = read_metrics(folder / "metrics" / "supervisor.jsonl")
    return sum(event["event"] == "death" for event in events)
