"""`edges_own`: objects and files that a backup lacks and that a removal leaves, over runs of every
kind (`testbed/own/kinds.py`). Each run is made by `rollstream run`, backed up, and removed.

The comparison walks through the run's folder and knows nothing of the declarations by which the
commands decide, so a writer without a declaration counts.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, alone
from testbed.own.compared import left_after_removal, missing_in_backup
from testbed.own.kinds import KINDS, make_derived, make_run

QUICK = ("evaluated", "agents")


def cases(quick: bool) -> Iterator[Case]:
    """Yields the case `edges_own`; it takes about ten minutes on two cores, `quick` three."""
    missing: list[str] = []
    left: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        runs = {kind: make_run(kind, folder / kind) for kind in (QUICK if quick else KINDS)}
        runs |= make_derived(runs["evaluated"], folder)
        for kind, run in runs.items():
            missing += [f"{kind}/{path}" for path in missing_in_backup(run)]
            left += [f"{kind}/{path}" for path in left_after_removal(run)]
    found = [f"missing in the backup: {path}" for path in missing]
    found += [f"left by rm: {path}" for path in left]
    note = f"{len(runs)} kinds of run ({', '.join(runs)}){''.join(f'; {one}' for one in found)}"
    yield alone("edges_own", len(missing) + len(left), "objects", at_most=0, note=note)
