"""A rollout that has used up its quota starts short answers beside its last long one, and no
others (docs/explanation/scheduling.md, Filling tails).
"""

from rollstream.producers.rollout.worker import RolloutLoop
from rollstream.streams.records import WeightsAnnounced
from rollstream.streams.values import Version
from rollstream.streams.writer import FencedWriter
from tests.rollout.test_giving_up import SETTINGS, Scene, order

QUOTA = 2 * SETTINGS.slots


def draining(predicted: int, newest: int = 1) -> tuple[Scene, RolloutLoop]:
    """A rollout whose quota is used up, with one running answer of this predicted length; a newer
    version is announced.
    """
    scene = Scene()
    both = scene.rollout("a")
    scene.order(order("a", trajectory="3.0", index=0, predicted=predicted))
    rollout = scene.turn(both, 2)
    assert set(rollout.driver.running) == {"3.0"}
    weights = FencedWriter(scene.bus, "weights", "trainer", 1)
    weights.open()
    newer = WeightsAnnounced("run", Version(newest, 1), "m", "h", "anchor", None, 1, 0.0)
    weights.append([("run", newer)])
    rollout.follower.read()
    rollout.drawn = QUOTA
    return scene, rollout


def started(rollout: RolloutLoop) -> set[str]:
    rollout.take_assignments()
    rollout.start_waiting()
    return set(rollout.driver.running)


def test_what_ends_before_the_tail_starts_although_the_quota_is_used_up() -> None:
    scene, rollout = draining(predicted=36)
    short = order("a", trajectory="4.0", group=4, predicted=10)
    long = order("a", trajectory="5.0", group=5, predicted=30)
    unknown = order("a", trajectory="6.0", group=6, predicted=0)
    scene.order(short, long, unknown)
    assert started(rollout) == {"3.0", "4.0"}
    assert rollout.drawn == QUOTA
    assert rollout.health() == "draining"


def test_a_tail_of_unknown_length_is_not_filled() -> None:
    scene, rollout = draining(predicted=0)
    scene.order(order("a", trajectory="4.0", group=4, predicted=10))
    assert started(rollout) == {"3.0"}


def test_what_fills_a_tail_has_no_tail_of_its_own() -> None:
    scene, rollout = draining(predicted=36)
    scene.order(order("a", trajectory="4.0", group=4, predicted=20))
    assert started(rollout) == {"3.0", "4.0"}
    rollout.driver.drop("3.0")
    scene.order(order("a", trajectory="5.0", group=5, predicted=5))
    assert started(rollout) == {"4.0"}


def test_a_version_that_is_too_old_fills_no_tails() -> None:
    scene, rollout = draining(predicted=36, newest=5)
    scene.order(order("a", trajectory="4.0", group=4, predicted=10))
    assert started(rollout) == {"3.0"}
