"""`first_hour_cases`: the share of the cases of `testbed/first_hour/` that end as they should;
the note names the others.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, alone
from testbed.first_hour.cases import CASES


def cases(quick: bool) -> Iterator[Case]:
    """Yields the share; the quick form leaves out slow cases."""
    tried = [case for case in CASES if not (quick and case.is_slow)]
    faults: list[str] = []
    for case in tried:
        with tempfile.TemporaryDirectory(prefix="rollstream-first-hour-") as folder:
            if fault := case.fault(Path(folder)):
                faults.append(f"{case.name}: {fault}")
    share = 1 - len(faults) / max(len(tried), 1)
    kinds = len({case.kind for case in tried})
    note = "; ".join([f"{len(tried)} cases of {kinds} kinds", *faults])
    yield alone("first_hour_cases", share, "of 1", at_least=1.0, note=note)
