"""Runs a tool server's command, and ends it with the process that started it, even by `kill -9`:
`python tool_command.py PARENT COMMAND …`. Imports nothing of the project: it starts in
milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h: the kernel sends a signal when the parent's thread dies


def main(parent: int, command: list[str]) -> int:
    """Becomes the command; returns 127 if it cannot be started."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        return 1
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
