"""Runs looking commands on hostile cases, and prints what they did.

python -m testbed.hostile_runs --list
python -m testbed.hostile_runs --case writing --call audit --real --show
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from testbed.hostile_runs.calls import CALLS
from testbed.hostile_runs.cases import CASES
from testbed.hostile_runs.matrix import Matrix
from testbed.hostile_runs.trial import FAULTS, HARMS, TIMEOUT_S
from testbed.servers.guard import guard, memory_folder


def main() -> int:
    """Prints one line for each fault; returns 1 if there is harm."""
    parser = argparse.ArgumentParser(prog="python -m testbed.hostile_runs", description=__doc__)
    parser.add_argument("--case", default="", help="only cases whose name contains this text")
    parser.add_argument(
        "--call",
        default="",
        help="only calls whose name contains one of these texts, separated by commas",
    )
    parser.add_argument("--part", default="0/1", help="only each N-th case, as 0/2")
    parser.add_argument("--kinds", default=",".join(FAULTS), help="kinds of faults that are shown")
    parser.add_argument("--real", action="store_true", help="processes in place of forks")
    parser.add_argument("--show", action="store_true", help="print what the commands print")
    parser.add_argument("--slow", type=float, default=20.0, help="show calls of more seconds")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds of one call")
    parser.add_argument("--list", action="store_true", help="list cases and calls, and end")
    options = parser.parse_args()
    cases = [case for case in CASES if options.case in case.name]
    calls = [c for c in CALLS if any(word in c.name for word in options.call.split(","))]
    if options.list:
        print(
            "\n".join(
                [*(f"case {c.name} ({c.kind})" for c in cases), *(f"call {c.name}" for c in calls)]
            )
        )
        return 0
    guard()
    part, parts = map(int, options.part.split("/"))
    shown, counts, started = options.kinds.split(","), Counter[str](), time.monotonic()
    with (
        tempfile.TemporaryDirectory(dir=memory_folder()) as root,
        Matrix(Path(root), not options.real, options.timeout) as matrix,
    ):
        for case, attempt in matrix.attempts(cases[part::parts], calls):
            counts["calls"] += 1
            for kind in FAULTS:
                details = [fault.detail for fault in attempt.faults if fault.kind == kind]
                counts[kind] += bool(details)
                if details and kind in shown:
                    more = f" (+ {len(details) - 1})" if len(details) > 1 else ""
                    print(
                        f"{kind:<10} {attempt.call:<32} {case.name:<44} {details[0]}{more}",
                        flush=True,
                    )
            if attempt.seconds > options.slow:
                print(
                    f"slow       {attempt.call:<32} {case.name:<44} {attempt.seconds:.1f} s",
                    flush=True,
                )
            if options.show:
                print(f"--- {attempt.call} on {case.name}: {attempt.code}, {attempt.seconds:.2f} s")
                print(attempt.output, flush=True)
    print(dict(counts), f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    return int(any(counts[kind] for kind in HARMS))


if __name__ == "__main__":
    sys.exit(main())
