"""`rollstream run CONFIG`: runs all roles of a run on this machine.

1. Settle the configuration in the run's folder. 2. Take the run's lock. 3. Create the topics.
4. Warm up, if there is no model. 5. Supervise the roles under a live view. 6. Report.
"""

import argparse
import json
import os
import sys
import time

from rich.console import Console

from rollstream.commands.configured import configured
from rollstream.commands.signals import StopSignals, listen
from rollstream.config import Configuration
from rollstream.folder import RunFolder, run_log, store_for_writing
from rollstream.identity import check_agrees, identify, record
from rollstream.live.look import Onlooker
from rollstream.live.plan import plan_of
from rollstream.live.view import LiveView
from rollstream.lock import RunLock
from rollstream.main import INTERRUPTED
from rollstream.metrics.endpoint import port_of, served
from rollstream.metrics.watch import Watch
from rollstream.report.dropped import biases
from rollstream.report.opening import open_history
from rollstream.report.summary import summarise
from rollstream.report.write import write_report
from rollstream.roster import seats_of, warmup_seat, with_ports
from rollstream.supervisor import Outcome, Supervisor
from rollstream.warming import Warming
from storage.metrics import MetricsFile
from streams.bus import Bus
from streams.topics import catalogue


def main(arguments: argparse.Namespace) -> int:
    """Run until the run is complete, stopped or failed."""
    configuration, folder = configured(arguments)  # 1
    signals = listen()
    console = Console(stderr=arguments.json)
    lock = RunLock(folder.path)  # 2
    bus = run_log(configuration, folder.path)
    bus.create(catalogue())  # 3
    try:
        _identify(configuration, folder, arguments.accept_config)
        seat = warmup_seat(configuration, folder)
        warming = Warming(configuration, folder, seat, console, lock)
        if not warming.run(signals):  # 4
            return INTERRUPTED
        outcome = _supervise(configuration, folder, bus, signals, console, lock, arguments)
        _end(folder, outcome, console, arguments.json)  # 6
    finally:
        bus.close()
        lock.close()
    return {"complete": 0, "stopped": INTERRUPTED, "failed": 1}[outcome.kind]


def _identify(configuration: Configuration, folder: RunFolder, accepted: bool) -> None:
    """Check that log and store belong to this run. An accepted configuration change is recorded
    before any role compares its own configuration with the run's.
    """
    store = store_for_writing(configuration, folder.path)
    identify(store, configuration.run)
    check_agrees(store, configuration, accepted)
    if accepted:
        record(store, configuration)


def _supervise(
    configuration: Configuration,
    folder: RunFolder,
    bus: Bus,
    signals: StopSignals,
    console: Console,
    lock: RunLock,
    arguments: argparse.Namespace,
) -> Outcome:
    now = time.time
    onlooker = Onlooker(plan_of(configuration), folder.metrics, lambda: bus, now, now())
    wanted = seats_of(configuration, folder, arguments.accept_config)
    seats = with_ports(wanted, port_of(configuration, os.environ))
    watch = Watch(signals.stop)
    with (
        served(configuration, folder.path, "supervisor", "supervisor", watch),
        MetricsFile(folder.metrics / "supervisor.jsonl") as events,
        LiveView(onlooker, console, arguments.json) as view,
    ):
        supervisor = Supervisor(seats, folder.logs, lock, events.append)
        watch.offer(supervisor.figures)
        return supervisor.run(watch.stop, signals.hurry, view.show)  # 5


def _end(folder: RunFolder, outcome: Outcome, console: Console, as_json: bool) -> None:
    """Print the summary and write the report; a failure message is printed last."""
    history = open_history(folder)
    summary = summarise(history)
    write_report(history, summary, folder.report)
    if as_json:
        print(json.dumps({"outcome": outcome.kind, **summary.line()}), flush=True)
    else:
        console.print(summary.table())
        console.print(f"report: {folder.report}", soft_wrap=True, highlight=False)
    for concern in biases(history.dropped.compared()):
        console.print(f"warning: {concern.what}: {concern.do}", highlight=False)
    if outcome.kind == "stopped":
        console.print("stopped; the same command resumes from the last checkpoint")
    if outcome.kind == "failed":
        print(f"rollstream: {outcome.message}", file=sys.stderr)
