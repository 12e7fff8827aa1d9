"""`rollstream run CONFIG`: runs all roles of a run on this machine until the run is complete,
stopped or failed. A run's folder has one supervisor at a time; the same command resumes the run.

1. Write the configuration into the run's folder. 2. Take the folder's lock. 3. Create the topics,
and check that the store belongs to this run. 4. Warm up: make the first model in the run's folder,
unless one is configured or present; put it into the store. 5. Supervise the roles (start them,
restart those that die) and show the live view. 6. Print the summary and write the report.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from rich.console import Console

from rollstream.cli.arguments import CommandParser
from rollstream.cli.configuration import load_and_settle
from rollstream.cli.main import EXIT_INTERRUPTED
from rollstream.cli.signals import StopSignals, listen_for_signals
from rollstream.config.identity import read_or_create_identity
from rollstream.config.recorded_configuration import check_configuration, record_configuration
from rollstream.config.run_folder import (
    RunFolder,
    open_run_log_for_writing,
    store_for_writing,
    store_url,
)
from rollstream.config.run_model import model_folder, store_starting_model
from rollstream.config.settings import Configuration
from rollstream.explorer.process import ExplorerProcess
from rollstream.metrics.endpoint import ProcessMetrics, metrics_port, serve_metrics
from rollstream.monitor.observer import RunObserver
from rollstream.monitor.snapshot import run_settings_of
from rollstream.monitor.view import LiveView
from rollstream.report.history import drop_bias_warnings
from rollstream.report.summary import open_history, summarise
from rollstream.report.write import write_report
from rollstream.sizes.check import check_memory, unassigned_use, uses_gpus
from rollstream.storage.archive.reading import allocate_tables_with_malloc
from rollstream.storage.log_view import LogView
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.streams.bus import Bus
from rollstream.streams.connect import check_reachable
from rollstream.streams.topics import catalogue
from rollstream.supervisor.cards import GpuCard, assign_cards, read_cards
from rollstream.supervisor.plan import process_specs, warmup_spec, with_metrics_ports
from rollstream.supervisor.process import ProcessSpec
from rollstream.supervisor.supervisor import RunLock, RunOutcome, Supervisor
from rollstream.warmup.process import WarmupProcess


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "examples/quickstart.toml",
        "examples/quickstart.toml --seed 2 --run runs/two --set trainer.lr=1e-4",
    )
    command.add_configuration()
    command.add_accept()
    help = "also serve the run to the browser (rollstream explore) while it is trained"
    command.add_argument("--explore", action="store_true", help=help)
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Run until the run is complete (returns 0), stopped (130) or failed (1)."""
    allocate_tables_with_malloc()
    configuration, folder = load_and_settle(arguments)  # 1
    check_reachable(configuration.bus)
    signals = listen_for_signals()
    console = Console(stderr=arguments.json)
    lock = RunLock(folder.path)  # 2
    bus = open_run_log_for_writing(configuration, folder.path)
    bus.create(catalogue())  # 3
    try:
        store = _identify(configuration, folder, arguments.accept_config)
        spec = warmup_spec(configuration, folder)
        warmup = WarmupProcess(configuration, folder, spec, console, lock)
        if not warmup.run(signals):  # 4
            return EXIT_INTERRUPTED
        # Refuses too small GPUs, so it comes before anything is uploaded.
        specs = _role_specs(configuration, folder, arguments.accept_config)
        store_starting_model(store, configuration, folder.path)
        with ExplorerProcess(folder, console) if arguments.explore else nullcontext():
            view = LiveView(_observer(configuration, folder, bus), console, arguments.json)
            outcome = _supervise(configuration, folder, signals, view, lock, specs)
        _end(folder, outcome, console, arguments.json)  # 6
    finally:
        bus.close()
        lock.close()
    return {"complete": 0, "stopped": EXIT_INTERRUPTED, "failed": 1}[outcome.kind]


def _identify(configuration: Configuration, folder: RunFolder, accepted: bool) -> ObjectStore:
    """Check that the store belongs to this run, and that the configuration may be used with it;
    returns the store.
    With `accepted` (`--accept-config`) a change of the configuration is recorded, before any role
    compares its own configuration with the recorded one.
    """
    store = store_for_writing(configuration, folder.path)
    read_or_create_identity(store, configuration.run)
    check_configuration(store, configuration, accepted)
    if accepted:
        record_configuration(store, configuration)
    return store


def _assign_cards(c: Configuration, folder: RunFolder) -> Mapping[str, Sequence[GpuCard]]:
    """Returns the GPUs of each process by the settings of `[devices]`; {} for a run that uses none.
    Raises `ConfigurationError` if this machine's GPUs do not allow the assignment, or if their
    memory is known to be too small for the run's model.
    """
    if not uses_gpus(c):
        return {}
    cards = read_cards(os.environ)
    assigned = assign_cards(c, cards)
    check_memory(c, model_folder(c, folder.path), assigned or unassigned_use(c, cards))
    return assigned


def _role_specs(c: Configuration, folder: RunFolder, accepted: bool) -> list[ProcessSpec]:
    """Returns the processes of the run, each with its GPUs and its metrics port."""
    specs = process_specs(c, folder, accepted, _assign_cards(c, folder))
    return with_metrics_ports(specs, metrics_port(c, os.environ))


def _observer(c: Configuration, folder: RunFolder, bus: Bus) -> RunObserver:
    now, store = time.time, open_store(store_url(c, folder.path), c.sync)
    log = LogView(bus, store, c.run)
    return RunObserver(run_settings_of(c), folder.metrics, lambda: log, now, now())


def _supervise(
    configuration: Configuration,
    folder: RunFolder,
    signals: StopSignals,
    view: LiveView,
    lock: RunLock,
    specs: Sequence[ProcessSpec],
) -> RunOutcome:
    """Run the processes until the run ends. Meanwhile show the live view, and serve the metrics of
    the supervisor and those of the whole run.
    """
    process_metrics = ProcessMetrics(signals.stop)
    with (
        serve_metrics(configuration, folder.path, "supervisor", "supervisor", process_metrics),
        MetricsFile(folder.metrics / "supervisor.jsonl") as events,
        view,
    ):
        supervisor = Supervisor(specs, folder.logs, lock, events.append)
        process_metrics.offer(supervisor.metric_values)
        process_metrics.offer(view.observer.metric_values)
        return supervisor.run(process_metrics.stop, signals.hurry, view.show)  # 5


def _end(folder: RunFolder, outcome: RunOutcome, console: Console, as_json: bool) -> None:
    """Print the summary and write the report; a failure message is printed last."""
    history = open_history(folder)
    summary = summarise(history)
    write_report(history, summary, folder.report)
    if as_json:
        print(json.dumps({"outcome": outcome.kind, **summary.line()}), flush=True)
    else:
        console.print(summary.table())
        console.print(f"report: {folder.report}", soft_wrap=True, highlight=False)
    for warning in drop_bias_warnings(history.dropped.compared()):
        console.print(f"warning: {warning.what}: {warning.do}", highlight=False)
    if outcome.kind == "stopped":
        console.print("stopped; the same command resumes from the last checkpoint")
    if outcome.kind == "failed":
        print(f"rollstream: {outcome.message}", file=sys.stderr)
