"""`python -m benchmarks.chaos --seed S --kills N` is one run of the quickstart under kills."""

import sys

from benchmarks.chaos.chaos import main

sys.exit(main())
