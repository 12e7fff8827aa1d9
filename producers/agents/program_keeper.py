"""Runs a command for one episode and ends with its exit code. When its standard input ends (the
rollout was killed), it kills the command's process group, itself included.
"""

import os
import signal
import subprocess
import sys
import threading

from rollstream.program_output import OutputPipe


def main(command: list[str]) -> int:
    """Runs the command; returns its exit code, or 127 if it cannot be started."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    # The command's output becomes lines of the rollout's log (`program_output.py`).
    printed = OutputPipe(2)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=printed.writer, stderr=printed.writer
        )
    except OSError as error:
        print(f"agent.command: {command[0]} cannot be started: {error}", file=sys.stderr)
        return 127
    code = process.wait()
    printed.close()
    return code if code >= 0 else 128 - code
