"""`rollstream rollout | train | dispatch | prompts | eval CONFIG`: one role in this process.

Exit 0 says that the role's work is done. One that was asked to stop exits 143 after stopping
cleanly, so that a supervisor that did not ask starts it again; a preemptible rollout has then done
what it was there for, and exits 0. A trainer of several processes is started and watched from here.
"""

import argparse
import logging
import math
import os
import secrets
import sys
import threading
import time
from importlib import import_module

from consumers.trainer.sharded.launch import is_launched
from rollstream.commands.configured import configured
from rollstream.commands.signals import listen
from rollstream.folder import RunFolder
from rollstream.lifeline import end_with_parent
from rollstream.rank_names import name_of_rank, parent_of_rank
from rollstream.roster import ACCEPT_CONFIG
from rollstream.supervisor import HANDED_NONCE, NONCE
from rollstream.train_group import run_group
from streams.errors import ConfigurationError

ASKED_TO_STOP = 143  # 128 + SIGTERM, as shells say it
GRACE_S = 20.0  # clouds give 25 s and more

HEAVY = {
    "rollout": "rollstream.rollout_role",
    "train": "rollstream.train_role",
    "eval": "rollstream.eval_role",
}
"""What takes seconds to import (torch): after a mistake in the configuration was told, and before
signals are taken over, so that a role that is only starting ends at once.
"""

log = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> int:
    """Until the role is done or a signal asks it to stop."""
    is_rank = arguments.command == "train"
    end_with_parent(parent_of_rank() if is_rank else os.environ)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    grace_s = _grace_s(arguments)
    configuration, folder = configured(arguments)
    if is_rank and configuration.trainer.processes > 1 and not is_launched():
        line = _line_of_rank(folder, arguments.name, arguments.accept_config)
        return run_group(line, configuration.trainer, listen())
    name = name_of_rank(arguments.name) if is_rank else arguments.name
    if arguments.command in HEAVY:
        import_module(HEAVY[arguments.command])
    from rollstream.role_place import RoleLaunch
    from rollstream.roles import run_role

    signals = listen()
    if grace_s is not None:
        end_after(signals.stop, grace_s)
    launch = RoleLaunch(
        role=arguments.command,
        configuration=configuration,
        folder=folder.path,
        name=name,
        stop=signals.stop,
        nonce=os.environ.get(NONCE) or secrets.token_hex(16),
        handed_nonce=os.environ.get(HANDED_NONCE),
        accept_config=getattr(arguments, "accept_config", False),
        grace_s=grace_s,
    )
    is_done = run_role(launch)
    log.info("%s %s", name, "is done" if is_done else "was stopped")
    return 0 if is_done or grace_s is not None else ASKED_TO_STOP


def end_after(stop: threading.Event, grace_s: float) -> None:
    """When `stop` is set this process has so many seconds left, whatever hangs."""

    def wait() -> None:
        stop.wait()
        time.sleep(grace_s)
        log.error(
            "the %g s of grace are over: what was not given up is resumed as after a death", grace_s
        )
        logging.shutdown()
        os._exit(1)

    threading.Thread(target=wait, name="grace", daemon=True).start()


def _line_of_rank(folder: RunFolder, name: str, accept_config: bool) -> list[str]:
    """Of the configuration in the run's folder, so that all ranks have the same."""
    line = [sys.executable, "-m", "rollstream", "train", str(folder.configuration), "--name", name]
    return [*line, ACCEPT_CONFIG] if accept_config else line


def _grace_s(arguments: argparse.Namespace) -> float | None:
    """Seconds of a preemptible rollout, None of any other role."""
    grace = getattr(arguments, "grace", None)
    if not getattr(arguments, "preemptible", False):
        if grace is not None:
            raise ConfigurationError("--grace is that of --preemptible, which was not given")
        return None
    if grace is not None and not (math.isfinite(grace) and grace > 0):
        raise ConfigurationError(f"--grace must be > 0 seconds, got {grace:g}")
    return GRACE_S if grace is None else grace
