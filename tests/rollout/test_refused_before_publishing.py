"""A completion that the trainer would refuse is published as dead, with the reason (invariants 2
and 12).
"""

from rollstream.streams.admissible import TrainingBounds
from rollstream.streams.records import Partial, Trajectory
from tests.rollout.test_giving_up import Scene, order


def finished(bounds: TrainingBounds) -> Trajectory:
    """The one completion of a rollout with these bounds."""
    scene = Scene()
    rollout, turns = scene.rollout("a")
    rollout.in_progress.bounds = bounds
    scene.order(order("a"))
    scene.turn((rollout, turns), 60)
    assert rollout.driver.running == {}
    assert not any(received.record.last for received in scene.records("partials", Partial))
    (received,) = scene.records("trajectories", Trajectory)
    return received.record


def test_a_trajectory_that_cannot_be_trained_is_one_dead_completion_with_its_reason():
    whole = finished(TrainingBounds())
    assert (whole.finish, whole.reward is None) == ("stop", False)
    length = len(whole.tokens)
    dead = finished(TrainingBounds(context_max=length - 1))
    assert (dead.trajectory, dead.finish, dead.reward) == ("3.1", "dead", None)
    assert dead.reason == f"refused (tokens): {length} tokens in a context of {length - 1}"


def test_a_trajectory_at_its_bounds_is_published_whole():
    whole = finished(TrainingBounds())
    bounds = TrainingBounds(int(whole.tokens.max()) + 1, len(whole.tokens), keep_version=True)
    assert finished(bounds).finish == whole.finish
