"""The command `rollstream`. Ctrl-C during the first imports ends the process at once, without a
traceback.
"""

import os
import signal
import sys

_EXIT_INTERRUPTED = 130


def _leave(*_: object) -> None:
    os._exit(_EXIT_INTERRUPTED)


def main() -> int:
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # A library's import may turn `KeyboardInterrupt` into another error.
    if is_default:
        signal.signal(signal.SIGINT, _leave)
    from rollstream.run.cli.main import main as run_command

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run_command()
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
