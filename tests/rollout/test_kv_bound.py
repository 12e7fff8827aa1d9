"""Where the KV capacity is the limit, assignments wait outside of the engine: a trajectory that has
not started belongs to no version, and may go to any rollout.
"""

from dataclasses import replace

import numpy as np
import torch

from rollstream.producers.engines.paced.engine import PacedEngine
from rollstream.producers.engines.paced.lengths import LengthSampler, LogNormal
from rollstream.producers.engines.roofline import Roofline
from rollstream.producers.rollout.in_progress import InProgress
from rollstream.producers.rollout.single_turn import SingleTurn
from rollstream.producers.rollout.worker import RolloutLoop
from tests.rollout.test_giving_up import SETTINGS, V0, Scene, order

SLOW = Roofline(weights_s=1.0, kv_token_s=0.0, row_s=0.0)


class Still:
    """No time passes, so running requests keep running."""

    scale = 1.0

    def now(self) -> float:
        return 0.0

    def wait_until(self, at_s: float) -> None:
        """Returns nothing."""


def rollout_of(scene: Scene, kv_capacity: int) -> RolloutLoop:
    rollout, _ = scene.rollout("a")
    engine = PacedEngine(
        {"head": torch.ones(2)},
        V0,
        Still(),
        slots=SETTINGS.slots,
        context_max=64,
        kv_capacity=kv_capacity,
        vocabulary=19,
        roofline=SLOW,
        lengths=LengthSampler(LogNormal(30, 40), 0.0),
    )
    parts = replace(rollout.driver.parts, engine=engine)
    return RolloutLoop(rollout.follower, rollout.assignments, InProgress(SingleTurn(parts)))


def long_orders(scene: Scene, count: int) -> None:
    prompt = np.arange(30, dtype=np.uint32) % 19
    scene.order(*(order("a", trajectory=f"3.{n}", index=n, tokens=prompt) for n in range(count)))


def started(kv_capacity: int) -> tuple[int, int]:
    """Of nine assignments: those started after one of the first five ended, and those still
    outside.
    """
    scene = Scene()
    rollout = rollout_of(scene, kv_capacity)
    long_orders(scene, 9)
    rollout.take_assignments()
    rollout.start_waiting()
    assert len(rollout.driver.running) == SETTINGS.slots + 1, "one more than there are slots"
    rollout.parts.engine.poll(0.0)
    rollout.driver.drop(next(iter(rollout.driver.running)))
    rollout.parts.engine.poll(0.0)  # a waiting one takes its place, if there is room
    rollout.start_waiting()
    return len(rollout.driver.running), len(rollout.assignments.waiting)


def test_a_full_cache_keeps_orders_outside_although_slots_are_free() -> None:
    assert started(kv_capacity=64) == (4, 4)


def test_with_room_in_the_cache_a_slot_that_is_free_is_taken_at_once() -> None:
    assert started(kv_capacity=400) == (5, 3)
