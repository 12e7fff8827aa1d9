"""`rollstream rollout | train | dispatch | prompts | eval CONFIG`: one role in this process.

Exit 0 says that the role's work is done. One that was asked to stop exits 143 after stopping
cleanly, so that a supervisor that did not ask starts it again.
"""

import argparse
import logging
import os
import secrets
from importlib import import_module

from rollstream.commands.configured import configured
from rollstream.commands.signals import listen
from rollstream.lifeline import end_with_parent
from rollstream.supervisor import HANDED_NONCE, NONCE

ASKED_TO_STOP = 143  # 128 + SIGTERM, as shells say it

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
    end_with_parent()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    configuration, folder = configured(arguments)
    if arguments.command in HEAVY:
        import_module(HEAVY[arguments.command])
    from rollstream.roles import run_role

    signals = listen()
    is_done = run_role(
        arguments.command,
        configuration,
        folder.path,
        name=arguments.name,
        stop=signals.stop,
        nonce=os.environ.get(NONCE) or secrets.token_hex(16),
        handed_nonce=os.environ.get(HANDED_NONCE),
        accept_config=getattr(arguments, "accept_config", False),
    )
    log.info("%s %s", arguments.name, "is done" if is_done else "was stopped")
    return 0 if is_done else ASKED_TO_STOP
