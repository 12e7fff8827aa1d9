"""Plants every kind of violation into a copy of the healthy run and audits it: for tests and
`benchmarks/analysis/audit.py`.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rollstream.consumers.audit.folds import InvariantResult
from testbed.violations.healthy_run import AuditedRun, audited, open_run
from testbed.violations.planted import PLANTED
from testbed.violations.planted_fields import OF_FIELDS, UNSEEN, Found
from testbed.violations.planted_objects import OF_OBJECTS


@dataclass(frozen=True)
class Kind:
    """`plant` writes the violation into an open run and returns the invariant and the text that
    audit must report.
    """

    name: str
    plant: Callable[[AuditedRun], Found]


def kinds() -> Iterator[Kind]:
    """All kinds that a log can show."""
    for plant, invariant, expected in PLANTED:
        yield Kind(plant.__name__, partial(_planted, plant, (invariant, expected)))
    for plant in (*OF_FIELDS, *OF_OBJECTS):
        yield Kind(plant.__name__, plant)


def _planted(plant: Callable[[AuditedRun], None], found: Found, run: AuditedRun) -> Found:
    plant(run)
    return found


def missed(kind: Kind, healthy: Path, scratch: Path, seed: int = 0) -> str:
    """The reason why this kind was not found; "" where it was."""
    folder = Path(shutil.copytree(healthy, scratch / kind.name))
    run = open_run(folder, 2, seed)
    invariant, expected = kind.plant(run)
    run.bus.close()
    result = audited(folder)[invariant]
    shutil.rmtree(folder)
    places = [f"{offender.where}: {offender.what}" for offender in result.offenders]
    if result.state == "kept" or not any(
        expected in place for place in [*places, *result.unchecked]
    ):
        return f"{kind.name}: {expected!r} is not in {places + result.unchecked}"
    return ""


def unseen(healthy: Path, scratch: Path) -> Iterator[tuple[str, str, dict[int, InvariantResult]]]:
    """The kinds that a log cannot show: name, reason, and audit's text."""
    for plant in UNSEEN:
        folder = Path(shutil.copytree(healthy, scratch / plant.__name__))
        run = open_run(folder, 2)
        why = plant(run)
        run.bus.close()
        yield plant.__name__, why, audited(folder)
        shutil.rmtree(folder)
