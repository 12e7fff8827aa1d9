"""Measures docker-compose.yml on a Docker daemon of its own, as root: the seconds until every
service is healthy with images and model there (`stack_up_s`), what random deaths cost
(`stack_kills`), and the CPU of the stack at rest (`stack_idle_cpu`).

A kill hits the first process of a random container, broker and object store too, and waits until it
is started again. Then the run has to end, and the audit to find every invariant kept, in a
container and from outside; hashes of steps are not compared here.
"""

import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, alone
from testbed.stack.compose import ROLES, SERVERS, Stack, wait_until
from testbed.stack.images import built_daemon
from testbed.stack.whole_run import (
    audit_inside,
    audit_outside,
    cpu_seconds,
    kill,
    newest_step,
    wait_for_report,
)

KILLS, SEEDS = 25, 2
IDLE_S = 120.0
UP_GOAL_S, IDLE_GOAL = 120.0, 0.02
BOUND_S = 3600.0
STEPS, STEPS_QUICK = 200, 40
"""More than are trained between the first kill and the last."""


def cases(quick: bool) -> Iterator[Case]:
    """Quick: one seed with six kills, and rest for half a minute."""
    with built_daemon() as daemon:
        killed, wrong = Counter[str](), 0
        for seed in range(1 if quick else SEEDS):
            stack = Stack(
                daemon, {"SEED": str(seed), "TRAINER__STEPS": str(40 if quick else STEPS)}
            )
            stack.down(with_data=True)
            try:
                yield from _measured(stack, seed, 6 if quick else KILLS, killed, quick)
            except AssertionError as failure:
                wrong += 1
                print(failure)
            finally:
                stack.down(with_data=True)
    note = ", ".join(f"{name} {count}" for name, count in sorted(killed.items()))
    yield alone("stack_kills", wrong, "lost + twice", at_most=0, note=f"killed: {note}")


def _measured(
    stack: Stack, seed: int, kills: int, killed: Counter[str], quick: bool
) -> Iterator[Case]:
    stack.up()  # makes the model
    stack.down()
    started_s = time.monotonic()
    stack.up()
    wait_until(stack, (*ROLES, *SERVERS), "healthy", BOUND_S)
    if seed == 0:
        up_s = time.monotonic() - started_s
        yield alone("stack_up_s", up_s, "s", at_most=UP_GOAL_S, note="images and model there")
    _kill_at_random(stack, random.Random(seed), kills, killed)
    wait_until(stack, ROLES, "ended", BOUND_S)
    wait_for_report(stack)
    audit_inside(stack)
    with tempfile.TemporaryDirectory() as folder:
        audit_outside(stack, Path(folder))
    if seed == 0:
        yield _idle(stack, IDLE_S / 4 if quick else IDLE_S)


def _kill_at_random(stack: Stack, choose: random.Random, kills: int, killed: Counter[str]) -> None:
    for _ in range(kills):
        if newest_step(stack) > STEPS:
            return  # the run is complete; the note counts the kills before
        running = [one for one in stack.containers() if one.status == "running"]
        container = choose.choice(running)
        kill(stack, container)
        killed[container.service] += 1
        time.sleep(choose.uniform(0.0, 5.0))


def _idle(stack: Stack, seconds: float) -> Case:
    """The service that uses most of a core while the run is complete."""
    before = cpu_seconds(stack)
    time.sleep(seconds)
    used = {name: (spent - before[name]) / seconds for name, spent in cpu_seconds(stack).items()}
    worst = max(used, key=lambda name: used[name])
    note = ", ".join(f"{name} {share:.4f}" for name, share in sorted(used.items()))
    return alone("stack_idle_cpu", used[worst], "cores", at_most=IDLE_GOAL, note=note)
