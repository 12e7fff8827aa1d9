"""Whether each concern of a run raises its alert (`alerts_raised`): its fault is planted into a
real log, a real Prometheus with the rules of `deploy/alerts.yml` scrapes the observer, and the
alert must fire for that run within two evaluations.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, alone
from testbed.oncall.watched_run import LIMIT_S, measure_alerts


def cases(quick: bool) -> Iterator[Case]:
    """All faults at once, each in a run of its own; a quick measurement is the same one."""
    with tempfile.TemporaryDirectory(prefix="rollstream-oncall-") as folder:
        delays = measure_alerts(Path(folder))
    found = {name: one for name, one in delays.items() if one is not None}
    missing = ", ".join(sorted(delays.keys() - found.keys())) or "none"
    raised = sum(one <= LIMIT_S for one in found.values())
    longest = max(found.values(), default=0.0)
    note = f"{raised} of {len(delays)} concerns, the slowest after {longest:.1f} s of {LIMIT_S:g}"
    yield alone(
        "alerts_raised",
        raised / len(delays),
        "share",
        at_least=1.0,
        note=f"{note}; without alert: {missing}",
    )
