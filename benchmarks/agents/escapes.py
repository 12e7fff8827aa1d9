"""Attempts to leave the sandbox `bubblewrap` (`testbed/escapes`), each with a proof of its effect
on this machine, and how many programs per second it starts.

The control runs the same attempts without a sandbox: there each has its effect, as far as the
machine lets this process (as root, all of them).
"""

import os
import time
from collections.abc import Iterator

from benchmarks.case import Case, alone
from rollstream.producers.sandbox.base import SandboxLimits, SandboxOptions
from rollstream.producers.sandbox.bubblewrap import Bubblewrap
from testbed.escapes.attempts import ATTEMPTS, escaped
from testbed.escapes.unconfined import Unconfined
from testbed.servers import bubblewrap

STARTS = 300


def cases(quick: bool) -> Iterator[Case]:
    """All attempts; the control and 300 starts (quick: no control, 50 starts)."""
    backend = Bubblewrap(SandboxOptions(), str(bubblewrap.program()))
    found = escaped(backend)
    holders = backend.report()
    note = f"of {len(ATTEMPTS)} attempts; memory: {holders['memory']}; user: {holders['user']}"
    named = f"; escaped: {', '.join(found)}" if found else ""
    yield alone("agents_escapes", len(found), "attempts", at_most=0, note=note + named)
    if not quick:
        control = escaped(Unconfined())
        missing = sorted({one.name for one in ATTEMPTS} - set(control))
        note = "the same without a sandbox" + (f"; held: {', '.join(missing)}" if missing else "")
        wanted = len(ATTEMPTS)
        yield alone(
            "agents_escapes_unconfined", len(control), "attempts", at_least=wanted, note=note
        )
    yield _starts(backend, 50 if quick else STARTS)


def _starts(backend: Bubblewrap, count: int) -> Case:
    """Sandboxes that run `/bin/true` and are removed, one after the other, per second of CPU of
    this process and its children: one core's worth.
    """
    backend.run_once(["/bin/true"], b"", {}, SandboxLimits())
    begun, begun_cpu_s = time.monotonic(), _cpu_s()
    for _ in range(count):
        assert backend.run_once(["/bin/true"], b"", {}, SandboxLimits()).ok
    cpu_s, wall_s = _cpu_s() - begun_cpu_s, time.monotonic() - begun
    note = f"per second of CPU; {count / wall_s:.0f} per second by the clock, one at a time"
    return alone("agents_sandbox_starts", count / cpu_s, "starts/s", note=note)


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
