"""Runs with planted faults, observed and served as the role `observe` serves a living one, for a
real Prometheus (`measure_alerts`). All are observed by one thread, in turn.
"""

import threading
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rollstream.look.monitor.observer import RunObserver
from rollstream.run.metrics.endpoint import ProcessMetrics, serve_metrics
from testbed.oncall.alert_rules import EVALUATION_S, alert_name
from testbed.oncall.faults import FAULTS, plant, prepare
from testbed.oncall.planted_run import PlantedRun, copy_of, write_healthy_run
from testbed.reference_pages import ALERTS
from testbed.scraping import endpoint
from testbed.servers.prometheus import Prometheus
from testbed.waiting import let_pass

SCRAPE_S = 5.0  # as in deploy/prometheus.yml
OBSERVE_S = 1.0
SETTLED_S = 2.0 * SCRAPE_S
LIMIT_S = 2.0 * EVALUATION_S
"""An alert that fires later than two evaluations after its fault is late."""


def measure_alerts(folder: Path, wait_s: float = 4.0 * EVALUATION_S) -> dict[str, float | None]:
    """Plant the fault of each concern into a run of its own; returns by concern the seconds after
    which its alert fired for its run, None if it did not within `wait_s`. Raises `AssertionError`
    if any alert fires for a healthy run.
    """
    write_healthy_run(folder / "healthy")
    runs = {name: copy_of(folder / "healthy", folder / name) for name in FAULTS}
    for name, run in runs.items():
        prepare(run, FAULTS[name])
    observing = threading.Lock()
    with ExitStack() as stack:
        for run in runs.values():
            stack.callback(run.close)
        targets = stack.enter_context(_served(runs, observing))
        server = stack.enter_context(Prometheus(targets, ALERTS, SCRAPE_S))
        _await_all(server, len(runs))
        let_pass(EVALUATION_S + SETTLED_S)
        assert not server.firing(), server.firing()
        planted: dict[str, float] = {}
        for name, run in runs.items():
            with observing:  # a fault is several writes, and no observer sees some of them alone
                plant(run, FAULTS[name])
            planted[name] = time.monotonic()
        return _delays(server, planted, wait_s)


def _delays(
    server: Prometheus, planted: Mapping[str, float], wait_s: float
) -> dict[str, float | None]:
    found: dict[str, float | None] = dict.fromkeys(planted)
    end = max(planted.values()) + wait_s
    while None in found.values() and time.monotonic() < end:
        firing = server.firing()
        for name, at_s in planted.items():
            if found[name] is None and (alert_name(name), name) in firing:
                found[name] = time.monotonic() - at_s
        let_pass(0.2)
    return found


def _await_all(server: Prometheus, runs: int) -> None:
    end = time.monotonic() + 60
    while len(server.query("group by (run) (rollstream_concern)")) < runs:
        assert time.monotonic() < end, "Prometheus does not scrape all runs"
        let_pass(0.5)


@contextmanager
def _served(runs: Mapping[str, PlantedRun], observing: threading.Lock) -> Generator[list[str]]:
    """Observe the runs under the lock, and serve each under its concern's name as the run's; yields
    addresses.
    """
    observers = {name: run.observer() for name, run in runs.items()}
    targets: list[str] = []
    with ExitStack() as stack:
        for name, run in runs.items():
            watch = ProcessMetrics(threading.Event())
            watch.offer(observers[name].metric_values)
            named = run.configuration.model_copy(update={"run": name})
            stack.enter_context(
                serve_metrics(named, run.folder.path, "observe", "observe", watch, {})
            )
            at = endpoint(run.folder.path, "observe")
            targets.append(f"{at['host']}:{at['port']}")
        stack.enter_context(_observed(list(observers.values()), observing))
        yield targets


@contextmanager
def _observed(observers: list[RunObserver], observing: threading.Lock) -> Generator[None]:
    stop = threading.Event()

    def observe() -> None:
        while not stop.wait(OBSERVE_S):
            for observer in observers:
                with observing:
                    observer.observe()

    thread = threading.Thread(target=observe, name="observer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
