"""Runs the command `rollstream` as `python -m rollstream`; the supervisor starts roles this way."""

import sys

from rollstream.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
