"""`python -m rollstream` is the command `rollstream`; the supervisor starts roles this way."""

import sys

from rollstream.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
