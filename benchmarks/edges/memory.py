"""Measures the memory of hostile queries of the explorer's SQL page: `edges_memory_mb` is the peak
of the process that runs them, over all of `HOSTILE`, and its goal the limit that the page states.

Each query asks for more than the machine has, or for more than DuckDB's own limit counts: in one
vector, in one text, in a Python value, in the reply. The run is the example archive. The queries
run below a limit of this process's address space, so that a missing bound fails the case only.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.case import Case, alone
from rollstream.errors import StoreError
from rollstream.look.explorer.filters import WrongRequest
from rollstream.look.explorer.serving import sql
from rollstream.look.query.locate import locate_run
from testbed.repository import ROOT

HOSTILE = (
    "SELECT list_sum(range(1000000000))",
    "SELECT len(range(3000000000))",
    "SELECT list(x) FROM range(100000000) r(x)",
    "SELECT repeat('x', 2000000000)",
    "SELECT repeat('x', 200000000) FROM range(10)",
    "SELECT string_agg(repeat('x', 1000000), '') FROM range(100000)",
    "SELECT list_reduce(range(100000000), lambda a, b: a + b)",
    "SELECT text_of(range(20000000)::UINTEGER[])",
    "SELECT regexp_replace(repeat('a', 100000000), '(a*)*b', 'x')",
    "SELECT histogram(x) FROM range(100000000) r(x)",
    "SELECT list_distinct(range(40000000))",
    "SELECT sum(len(x::VARCHAR || repeat('y', 100000000))) FROM range(20) r(x)",
    "SELECT map(range(20000000), range(20000000))",
    "SELECT range(3000000) FROM range(100)",
)
QUICK = 5
ADDRESSES = 12 << 30


def cases(quick: bool) -> Iterator[Case]:
    """Yields the case, from a process of its own: the peak is that of all its ended children."""
    count = QUICK if quick else len(HOSTILE)
    command = [sys.executable, "-m", "benchmarks.edges.memory", str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    peak_mb, longest_s, refused = map(float, done.stdout.split())
    note = f"{count} queries, {refused:.0f} refused, the longest {longest_s:.1f} s"
    yield alone("edges_memory_mb", peak_mb, "MB", at_most=sql.MEMORY / (1 << 20), note=note)


def main(count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    location = locate_run(str(ROOT / "examples" / "archive"))
    free = sql.FreeSql({"0": location}, lambda run, text: None)
    times: list[float] = []
    refused = 0
    for query in HOSTILE[:count]:
        started_s = time.monotonic()
        try:
            free.answer("0", query)
        except (WrongRequest, StoreError):
            refused += 1
        times.append(time.monotonic() - started_s)
    free.close()
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(peak_mb, max(times), refused)


if __name__ == "__main__":
    main(int(sys.argv[1]))
