"""`rollstream run CONFIG`: runs all roles on this machine until the run is complete, stopped or
failed; the same command resumes it.

1. make all checks, before anything is written; 2. write the configuration; 3. take the folder's
lock: one supervisor at a time; 4. create the topics, and check that the store belongs to this run
(a complete run continues with 7); 5. warm up, unless there is a model, and put it into the store;
6. supervise the roles and show the live view; 7. print the summary and write the report.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from typing import Any

from rich.console import Console

from rollstream.errors import RollstreamError
from rollstream.look.explorer.serving.process import ExplorerProcess
from rollstream.look.explorer.serving.report_file import write_report
from rollstream.look.monitor.feed import JsonLinesTail
from rollstream.look.monitor.observer import RunObserver
from rollstream.look.monitor.sessions import ENDINGS
from rollstream.look.monitor.snapshot import run_settings_of
from rollstream.look.monitor.view import LiveView
from rollstream.look.query.locate import locate_run
from rollstream.look.query.own_runs import remember_begun
from rollstream.look.report.summary import open_history, summarise
from rollstream.look.report.untrained import drop_bias_warnings
from rollstream.printable import shell_command
from rollstream.run.checks.machine import assigned_cards
from rollstream.run.cli.arguments import CommandParser
from rollstream.run.cli.check import print_notes
from rollstream.run.cli.configuration import load_checked, settle
from rollstream.run.cli.main import EXIT_INTERRUPTED
from rollstream.run.cli.put_model import show_upload
from rollstream.run.config.recorded_configuration import (
    accepted_changes,
    check_configuration,
    record_configuration,
)
from rollstream.run.config.run_folder import (
    RunFolder,
    open_run_log_for_writing,
    store_for_writing,
    store_url,
)
from rollstream.run.config.run_model import model_folder, store_starting_model
from rollstream.run.config.settings import Configuration
from rollstream.run.console import TerminalConsole
from rollstream.run.metrics.endpoint import ProcessMetrics, metrics_port, serve_metrics
from rollstream.run.roles.completion import is_complete
from rollstream.run.signals import StopSignals, listen_for_signals, progress_line, terminable, warn
from rollstream.run.supervisor.plan import process_specs, warmup_spec, with_metrics_ports
from rollstream.run.supervisor.process import ProcessSpec, warn_unwritten
from rollstream.run.supervisor.supervisor import RunLock, RunOutcome, Supervisor
from rollstream.run.warmup.process import WarmupProcess
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.archive.reading import allocate_tables_with_malloc
from rollstream.storage.identity import read_or_create_identity
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.streams.bus import Bus
from rollstream.streams.topics import catalogue


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "examples/quickstart.toml --run runs/quickstart-0",
        "examples/quickstart.toml --seed 2 --run runs/two --set trainer.lr=1e-4",
    )
    command.add_configuration()
    command.add_accept()
    help = "also serve the run to the browser (rollstream explore) while it is trained"
    command.add_argument("--explore", action="store_true", help=help)
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Returns 0 for a complete run, 130 for a stopped and 1 for a failed one."""
    allocate_tables_with_malloc()
    console = TerminalConsole(stderr=arguments.json)
    try:
        with terminable():
            report, folder = load_checked(arguments)  # 1
    except KeyboardInterrupt:
        return _stopped(console)
    print_notes(report, console)
    report.refuse()
    configuration = report.configuration
    settle(configuration, folder, arguments, bool(report.fitted))  # 2
    with ExitStack() as opened:
        try:
            with terminable():
                lock = RunLock(folder.path)  # 3
                opened.callback(lock.close)
                bus = opened.enter_context(
                    closing(open_run_log_for_writing(configuration, folder.path))
                )
                bus.create(catalogue())  # 4
                store = _identify(bus, configuration, folder, arguments.accept_config)
        except KeyboardInterrupt:
            return _stopped(console)
        if _has_completed(store, configuration, folder):
            steps = configuration.trainer.steps
            console.print(
                f"the run in {folder.path} is complete: {steps} of {steps} steps; nothing was "
                "started. A larger trainer.steps with --accept-config continues it",
                soft_wrap=True,
                highlight=False,
            )
            _end(folder, RunOutcome("complete"), console, arguments.json)
            return 0
        signals = listen_for_signals()
        spec = warmup_spec(configuration, folder)
        warmup = WarmupProcess(configuration, folder, spec, console, lock)
        if not warmup.run(signals):  # 5
            return _stopped(console)
        # Refuses too small GPUs, so it comes before anything is uploaded.
        specs = _role_specs(configuration, folder, arguments.accept_config)
        if not has_uploaded(store, configuration, folder, signals):
            return _stopped(console)
        with ExplorerProcess(folder, console) if arguments.explore else nullcontext():
            view = LiveView(_observer(configuration, folder, bus), console, arguments.json)
            outcome = _supervise(configuration, folder, signals, view, lock, specs)
        if lost := lock.lost_folder():
            print(f"rollstream: {lost}; its processes are ended", file=sys.stderr)
            return 1
        _end(folder, outcome, console, arguments.json)  # 7
    return {"complete": 0, "stopped": EXIT_INTERRUPTED, "failed": 1}[outcome.kind]


def _stopped(console: Console) -> int:
    console.print("stopped; the same command resumes")
    return EXIT_INTERRUPTED


def has_uploaded(
    store: ObjectStore, configuration: Configuration, folder: RunFolder, signals: StopSignals
) -> bool:
    """Puts the starting model into the run's store; False if a signal ended that."""
    try:
        with terminable():
            if not signals.stop.is_set():
                store_starting_model(store, configuration, folder.path, show_upload)
    except KeyboardInterrupt:
        return False
    finally:
        progress_line("")
    return not signals.stop.is_set()


def _has_completed(store: ObjectStore, configuration: Configuration, folder: RunFolder) -> bool:
    events = JsonLinesTail(folder.metrics / "supervisor.jsonl").read()
    kinds = [event.get("event") for event in events if event.get("event") in (*ENDINGS, "start")]
    # After a stop during the last evaluation the next start makes it.
    is_ended = bool(kinds) and ENDINGS.get(str(kinds[-1])) == "finished"
    return is_ended and is_complete(store, configuration.trainer.steps)


def _identify(
    bus: Bus, configuration: Configuration, folder: RunFolder, accepted: bool
) -> ObjectStore:
    """Checks that store and configuration are the run's; prints from where on each accepted change
    holds.
    """
    store = store_for_writing(configuration, folder.path)
    identity = read_or_create_identity(store, configuration.run)
    remember_begun(identity.id, configuration.model_dump(mode="json"), folder.path)
    check_configuration(store, configuration, accepted)
    # Recorded before any role compares its own configuration.
    if accepted:
        for change in accepted_changes(bus, store, configuration):
            print(f"rollstream: {change}", file=sys.stderr)
        record_configuration(store, configuration)
    return store


def _role_specs(c: Configuration, folder: RunFolder, accepted: bool) -> list[ProcessSpec]:
    cards = assigned_cards(c, lambda: model_folder(c, folder.path))
    specs = process_specs(c, folder, accepted, cards)
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
    process_metrics = ProcessMetrics(signals.stop)
    with (
        serve_metrics(configuration, folder.path, "supervisor", "supervisor", process_metrics),
        MetricsFile(folder.metrics / "supervisor.jsonl") as events,
        view,
    ):
        supervisor = Supervisor(specs, folder.logs, lock, events.append)
        process_metrics.offer(supervisor.metric_values)
        process_metrics.offer(view.observer.metric_values)
        return supervisor.run(process_metrics.stop, signals.hurry, view.show)  # 6


def _end(folder: RunFolder, outcome: RunOutcome, console: Console, as_json: bool) -> None:
    history, line, is_written = None, dict[str, Any](), False
    try:
        with terminable():
            history = open_history(folder)
            summary = summarise(history)
            line = summary.line()
            if not as_json:
                console.print(summary.table())
            write_report(history, summary, folder.report, locate_run(str(folder.path)), tell=warn)
        is_written = True
    # A long log takes long to read.
    except KeyboardInterrupt:
        command = shell_command("report", folder.path)
        warn(f"the summary was interrupted; `{command}` writes it")
    # A full disk, or a log that cannot be read: the run has ended, so it is a warning.
    except OSError as error:
        warn_unwritten(folder.report, error, "`rollstream report` writes it again")
    except RollstreamError as error:
        command = shell_command("report", folder.path)
        warn(f"there is no summary: {error}; `{command}` writes it again")
    if as_json:
        print(json.dumps({"outcome": outcome.kind, **line}), flush=True)
    elif is_written:
        console.print(f"report: {folder.report}", soft_wrap=True, highlight=False)
    for warning in drop_bias_warnings(history.dropped) if history else ():
        console.print(f"warning: {warning.what}: {warning.do}", highlight=False)
    if outcome.kind == "stopped":
        console.print("stopped; the same command resumes from the last checkpoint")
    if outcome.kind == "complete" and outcome.message:
        command = shell_command("eval", str(folder.path))
        warn(f"{outcome.message}: `{command}` evaluates the kept versions")
    if outcome.kind == "failed":
        print(f"rollstream: {outcome.message}", file=sys.stderr)
