"""Starts a program with the episode's prompt as its last argument, for programs that know nothing
of Rollstream: `python with_prompt.py PROGRAM ARGUMENT…`. Needs nothing but Python.
"""

import json
import os
import sys

os.execvp(sys.argv[1], [*sys.argv[1:], json.loads(os.environ["ROLLSTREAM_TASK"])["prompt"]])
