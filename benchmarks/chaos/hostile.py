"""Hostile records in running runs (invariant 12): real processes over SQLite and over Kafka, while
seeded records are appended to every topic of many writers.

`hostile_deaths` counts roles that ended, groups that were trained in one run only, and the
violations that audit reports. `hostile_accounted` is the share of hostile records accounted for
exactly once: unreadable bytes by one copy in `.dead`, readable records by a refusal that the acting
role counts. The same seed appends the same records; when each of them is appended depends on the
machine.
"""

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, alone
from benchmarks.chaos import false_deaths

RECORDS, RECORDS_QUICK = 50_000, 4_000
"""Records in each form; both forms together append the 100 000 of the promise."""
STEPS, STEPS_QUICK = 160, 60
FORMS = {"embedded": "SQLite and files", "cloud": "Kafka and S3"}


def cases(quick: bool) -> Iterator[Case]:
    """Goals: deaths 0, accounted 1, false deaths 0."""
    from testbed.hostile.processes import hostile_pair

    logging.disable(logging.WARNING)
    count, steps = (RECORDS_QUICK, STEPS_QUICK) if quick else (RECORDS, STEPS)
    deaths = unaccounted = 0
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rollstream-hostile-") as scratch:
        for seed, form in enumerate(FORMS):
            calm, met = hostile_pair(Path(scratch) / form, form, seed, count, steps)
            differing = len(calm.trained ^ met.trained)
            deaths += met.ended.total() + differing + len(met.wrong)
            unaccounted += met.unaccounted
            first = f", first: {met.wrong[0]}" if met.wrong else ""
            notes.append(
                f"{FORMS[form]}: {len(met.trained)} groups trained, {differing} differ, ended "
                f"{dict(met.ended) or 'none'}, {len(met.wrong)} violations{first}; "
                f"{len(met.expected)} unreadable, {met.readable} readable, refused {met.refused}"
            )
    note = f"{2 * count} records; {'; '.join(notes)}"
    yield alone("hostile_deaths", deaths, "deaths", at_most=0, note=note)
    share = 1 - unaccounted / (2 * count)
    yield alone("hostile_accounted", share, "share", at_least=1, note=f"{unaccounted} are not")
    yield from false_deaths.cases(quick)
