"""Measures docker-compose.yml on a Docker daemon of its own, as root: the seconds until every
service is healthy with images and model there (`stack_up_s`), the CPU of the stack at rest, its run
complete (`stack_idle_cpu`), what random deaths cost (`stack_kills`, `kills.py`), and what the form
of containers costs (`stack_form_cost`, `form_cost.py`).
"""

import time
from collections.abc import Iterator

from benchmarks.case import Case, alone
from benchmarks.stack import form_cost, kills
from testbed.stack.compose import ROLES, SERVERS, Stack, wait_until
from testbed.stack.images import built_daemon
from testbed.stack.whole_run import StackRun, cpu_seconds

IDLE_S = 120.0
UP_GOAL_S, IDLE_GOAL = 120.0, 0.02
BOUND_S = 3600.0
SETTINGS = {"TRAINER__STEPS": "10", "WARMUP__STEPS": "60", "WARMUP__DOCUMENTS": "1000"}
"""Neither figure is of the training."""


def cases(quick: bool) -> Iterator[Case]:
    """Quick: rest for half a minute, six kills, and one pair."""
    with built_daemon() as daemon:
        stack = Stack(daemon, SETTINGS)
        stack.down(with_data=True)
        try:
            yield from _measured(stack, IDLE_S / 4 if quick else IDLE_S)
        finally:
            stack.down(with_data=True)
        yield from kills.cases(daemon, quick)
        yield from form_cost.cases(daemon, quick)


def _measured(stack: Stack, rest_s: float) -> Iterator[Case]:
    stack.up()  # makes the model
    stack.down()
    started_s = time.monotonic()
    stack.up()
    wait_until(stack, (*ROLES, *SERVERS), "healthy", BOUND_S)
    up_s = time.monotonic() - started_s
    yield alone("stack_up_s", up_s, "s", at_most=UP_GOAL_S, note="images and model there")
    wait_until(stack, ROLES, "ended", BOUND_S)
    StackRun(stack).wait_for_report()
    yield _idle(stack, rest_s)


def _idle(stack: Stack, seconds: float) -> Case:
    """The service that uses most of a core while the run is complete."""
    before = cpu_seconds(stack)
    time.sleep(seconds)
    used = {name: (spent - before[name]) / seconds for name, spent in cpu_seconds(stack).items()}
    worst = max(used, key=lambda name: used[name])
    note = ", ".join(f"{name} {share:.4f}" for name, share in sorted(used.items()))
    return alone("stack_idle_cpu", used[worst], "cores", at_most=IDLE_GOAL, note=note)
