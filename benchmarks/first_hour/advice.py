"""`advice_right`: the share of the situations of `testbed/first_hour/advice_situations.py`, planted
and alike, in which a run's advice is right or silent; the note names the others.
"""

from collections.abc import Iterator

from benchmarks.case import Case, alone
from testbed.first_hour.advice_situations import LOOK_ALIKES, PLANTED, SITUATIONS


def cases(quick: bool) -> Iterator[Case]:
    faults = [(one.name, fault) for one in SITUATIONS if (fault := one.fault())]
    note = f"{len(PLANTED)} planted situations, {len(LOOK_ALIKES)} look-alikes"
    note = "; ".join([note, *(f"{name}: {fault}" for name, fault in faults)])
    share = 1 - len(faults) / len(SITUATIONS)
    yield alone("advice_right", share, "of 1", at_least=1.0, note=note)
