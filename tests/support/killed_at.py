"""`rollstream` as a process that ends itself with SIGKILL after the nth call of one method, so that
no test has to hit the moment from outside.

`python -m tests.support.killed_at MODULE:CLASS.METHOD N COMMAND …`
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import count
from typing import Any

from testbed.repository import ROOT
from testbed.waiting import WAIT_S


def run_killed_at(method: str, nth: int, command: Sequence[str]) -> None:
    """Runs it to that call (the first one is 1); fails where it ends in another way."""
    line = [sys.executable, "-m", "tests.support.killed_at", method, str(nth), *command]
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == -signal.SIGKILL, f"it was not killed: {done.stdout}{done.stderr}"


def main() -> None:
    from rollstream.run.cli.main import main as rollstream

    place, nth, *words = sys.argv[1:]
    module, _, dotted = place.partition(":")
    owner, _, name = dotted.partition(".")
    target = getattr(import_module(module), owner)
    made, calls = getattr(target, name), count(1)

    def deadly(*given: Any, **named: Any) -> Any:
        result = made(*given, **named)
        if next(calls) == int(nth):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(target, name, deadly)
    raise SystemExit(rollstream(words))


if __name__ == "__main__":
    main()
