"""`rollstream ROLE CONFIG`, for every role of `run/role_catalogue.py`. Exit code 0: the role's work
is done, with `--until-complete` also the run; 143: a clean stop by a signal, after which a
supervisor restarts it, or 0 for a preemptible rollout.
"""

import argparse
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from rollstream.consumers.trainer.rank_plan import is_launched
from rollstream.errors import ConfigurationError, RollstreamError
from rollstream.import_path import module_command
from rollstream.run.cli.arguments import EXAMPLE_RUN, CommandParser
from rollstream.run.cli.configuration import load_and_settle, load_configuration
from rollstream.run.cli.main import exit_code_of
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.run_model import model_folder
from rollstream.run.config.settings import Configuration
from rollstream.run.role_catalogue import ROLES
from rollstream.run.signals import listen_for_signals
from rollstream.run.sizes.check import check_memory, lone_use, uses_gpus
from rollstream.run.supervisor.cards import ranks_of_slurm, read_cards
from rollstream.run.supervisor.plan import ACCEPT_CONFIG
from rollstream.run.supervisor.process import end_with_parent
from rollstream.run.supervisor.supervisor import HANDED_NONCE, NONCE
from rollstream.run.supervisor.train_group import rank_environment, rank_name, run_rank_processes
from rollstream.storage.archive.reading import allocate_tables_with_malloc
from rollstream.streams.foreign_text import whole_number

# 128 + SIGTERM, the shell convention.
EXIT_STOPPED = 143
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Clouds give 25 s and more between their notice and the machine's end.
GRACE_S = 20.0

log = logging.getLogger(__name__)


class JsonLogFormatter(logging.Formatter):
    """Formats one JSON object a line: time (ISO 8601, UTC), level, logger, role, name, run, message
    and exception, or null. `run` is empty before the configuration is loaded.
    """

    def __init__(self, role: str, name: str) -> None:
        super().__init__()
        self.run = ""
        self._role, self._name = role, name

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "role": self._role,
            "name": self._name,
            "run": self.run,
            "message": record.getMessage(),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps(line)


def add_arguments(command: CommandParser) -> None:
    needs = " --set agent.front=127.0.0.1:8700" if command.command == "endpoint" else ""
    command.add_examples(f"{EXAMPLE_RUN}{needs}")
    command.add_process_name()
    command.add_log()
    if command.command == "eval":
        command.add_examples(f"{EXAMPLE_RUN} --versions 0,10,60 --samples 16 --json")
        command.add_argument(
            "--versions", metavar="N,N…", help="evaluate these stored versions, then exit"
        )
        command.add_argument("--samples", metavar="N", type=int, help="samples per prompt")
    command.add_configuration()
    if command.command == "eval":
        command.add_json()
    if ROLES[command.command].records_configuration:
        command.add_accept()
    if ROLES[command.command].ends == "never":
        command.add_argument(
            "--until-complete",
            action="store_true",
            help="exit with 0 once the run is complete, as an orchestrator needs it",
        )
    if command.command == "rollout":
        command.add_examples(
            "runs/quickstart-0 --name rollout-extra",
            f"{EXAMPLE_RUN} --name spot-1 --preemptible --grace 25",
        )
        command.add_argument(
            "--preemptible",
            action="store_true",
            help="for a machine that may be reclaimed: gets short trajectories, hands all of them "
            "over on SIGTERM, then exits 0",
        )
        command.add_argument(
            "--grace",
            metavar="SECONDS",
            type=float,
            help="with --preemptible: time from SIGTERM to the forced exit (default 20)",
        )


def main(arguments: argparse.Namespace) -> int:
    """Runs until the role is done or a signal stops it. With `--log json` an error that ends the
    role is a JSON line too.
    """
    if getattr(arguments, "versions", None) is not None:
        return _evaluate_stored(arguments)
    handler = logging.StreamHandler()
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    if arguments.log == "text":
        handler.setFormatter(logging.Formatter(TEXT_FORMAT))
        return _run(arguments, lambda run: None)
    formatter = JsonLogFormatter(arguments.command, arguments.name)
    handler.setFormatter(formatter)
    try:
        return _run(arguments, lambda run: setattr(formatter, "run", run))
    except RollstreamError as error:
        log.error("%s", error)
        return exit_code_of(error)
    # The traceback would be lines that are not JSON.
    except Exception:
        log.critical("the role failed", exc_info=True)
        return 1


def _run(arguments: argparse.Namespace, on_run: Callable[[str], None]) -> int:
    role, is_rank = ROLES[arguments.command], arguments.command == "train"
    if is_rank:
        os.environ.update(ranks_of_slurm(os.environ))
    end_with_parent(rank_environment() if is_rank else os.environ)
    allocate_tables_with_malloc()
    grace_s = _grace_s(arguments)
    configuration, folder = load_and_settle(arguments)
    on_run(configuration.run)
    if is_rank and configuration.trainer.processes > 1 and not is_launched():
        line = _line_of_rank(folder, arguments)
        return run_rank_processes(line, configuration.trainer, listen_for_signals())
    check_own_cards(role.name, configuration, folder)
    name = rank_name(arguments.name) if is_rank else arguments.name
    # The role's module may import torch, which takes seconds: after validation, so that errors
    # appear at once, and before signals are handled, so that one ends a starting role.
    role.load()
    from rollstream.run.roles.context import RoleLaunch
    from rollstream.run.roles.roles import run_role

    signals = listen_for_signals()
    if grace_s is not None:
        exit_after_grace(signals.stop, grace_s)
    launch = RoleLaunch(
        role=role.name,
        configuration=configuration,
        folder=folder.path,
        name=name,
        stop=signals.stop,
        nonce=os.environ.get(NONCE) or secrets.token_hex(16),
        handed_nonce=os.environ.get(HANDED_NONCE),
        accept_config=getattr(arguments, "accept_config", False),
        grace_s=grace_s,
        until_complete=getattr(arguments, "until_complete", False),
    )
    is_done = run_role(launch)
    log.info("%s %s", name, "is done" if is_done else "was stopped")
    return 0 if is_done or grace_s is not None else EXIT_STOPPED


def check_own_cards(command: str, c: Configuration, folder: RunFolder) -> None:
    """Raises `ConfigurationError` for a trainer or a rollout that was started alone and does not
    fit its GPUs.
    """
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    # The supervisor has checked its roles; of a machine's ranks the first one checks.
    if NONCE in os.environ or not is_first or not uses_gpus(c):
        return
    ranks = int(os.environ["WORLD_SIZE"]) if command == "train" and is_launched() else None
    used = lone_use(c, command, read_cards(os.environ))
    check_memory(c, model_folder(c, folder.path), used, ranks)


def exit_after_grace(stop: threading.Event, grace_s: float) -> None:
    """`grace_s` seconds after `stop`, even if the role hangs."""

    def wait() -> None:
        stop.wait()
        time.sleep(grace_s)
        log.error(
            "grace period of %g s is over: remaining trajectories are resumed as after a death",
            grace_s,
        )
        logging.shutdown()
        os._exit(1)

    threading.Thread(target=wait, name="grace", daemon=True).start()


def _line_of_rank(folder: RunFolder, arguments: argparse.Namespace) -> list[str]:
    # All ranks load the configuration in the run's folder.
    words = (str(folder.configuration), "--name", arguments.name, "--log", arguments.log)
    line = module_command("rollstream", "train", *words)
    return [*line, ACCEPT_CONFIG] if arguments.accept_config else line


def _grace_s(arguments: argparse.Namespace) -> float | None:
    grace = getattr(arguments, "grace", None)
    if not getattr(arguments, "preemptible", False):
        if grace is not None:
            raise ConfigurationError("--grace needs --preemptible")
        return None
    if grace is not None and not (math.isfinite(grace) and grace > 0):
        raise ConfigurationError(f"--grace must be > 0 seconds, got {grace:g}")
    return GRACE_S if grace is None else grace


def _evaluate_stored(arguments: argparse.Namespace) -> int:
    versions = parse_versions(arguments.versions)
    if arguments.samples is not None:
        arguments.overrides.append(f"evaluation.samples={arguments.samples}")
    configuration, folder = load_configuration(arguments)
    from rollstream.run.roles.roles import evaluate_versions

    for line in evaluate_versions(configuration, folder.path, versions):
        print(json.dumps(line) if arguments.json else in_words(line), flush=True)
    return 0


def parse_versions(text: str) -> list[int]:
    numbers = [whole_number(part.strip()) for part in text.split(",")]
    if None in numbers:
        raise ConfigurationError(f"--versions {text[:80]!r}: write numbers, e.g. 0,10,60")
    return [number for number in numbers if number is not None]


def in_words(line: dict[str, Any]) -> str:
    shares = {name.removeprefix("pass_at/"): v for name, v in line.items() if "pass_at/" in name}
    passes = "".join(f"pass@{k} {share:.3f}, " for k, share in shares.items())
    return (
        f"version {line['step']}: sampled accuracy {line['accuracy_sampled']:.3f}, {passes}"
        f"greedy {line['accuracy_greedy']:.3f}, "
        f"length median {line['length_median']:g}, p99 {line['length_p99']:g}"
    )
