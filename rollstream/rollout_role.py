"""A rollout as a role: waits for the first announced version, then puts engine and
worker together.
"""

import os
import time

from producers.engines.connect import open_engine
from producers.rewards import RewardPool
from producers.rollout.judging import Judging
from producers.rollout.orders import Orders
from producers.rollout.outbox import Outbox
from producers.rollout.pulse import Pulse
from producers.rollout.voice import Voice
from producers.rollout.weights import Fetched, WeightsFollower, compared_whole
from producers.rollout.worker import Rollout
from producers.tasks.base import Environment
from rollstream.roles import Place, set_threads
from rollstream.run_task import task_of, task_settings
from storage.manifest import read_manifest
from storage.model import config_from_version
from storage.roles import next_term

WAIT_S = 0.02


def build_rollout(place: Place) -> Rollout | None:
    """The worker under its next term; None when it was stopped before a version was announced."""
    c = place.configuration
    set_threads(c.rollouts.threads)
    os.nice(c.rollouts.niceness)
    task = task_of(c, place.folder)
    term = next_term(place.store, "rollouts", place.name)
    orders = Orders(place.bus, place.name, term)
    follower = WeightsFollower(place.bus, place.store)
    fetched = _first(place, follower)
    if fetched is None:
        return None
    started = time.perf_counter()
    manifest = read_manifest(
        place.store, fetched.announced.version, fetched.announced.manifest_hash
    )
    engine = open_engine(
        c.rollouts.engine,
        config_from_version(place.store, manifest),
        fetched.update.tensors,
        fetched.announced.version,
        slots=c.rollouts.slots,
        context_max=c.rollouts.context_max,
    )
    pulse = Pulse(c.rollouts.status_s)
    voice = Voice(place.bus, Outbox(place.bus), place.name, term, c.rollouts, pulse)
    voice.applied(compared_whole(fetched, engine.read_back, started))
    judging = Judging(
        RewardPool(task_settings(c, place.folder)),
        isinstance(task, Environment),
        term,
        lambda: engine.version if follower.newest is None else follower.newest.version,
        late=c.task.reward == "late",
    )
    return Rollout(c.rollouts, engine, follower, orders, judging, voice)


def _first(place: Place, follower: WeightsFollower) -> Fetched | None:
    """The newest announced version, as soon as there is one."""
    while not place.stop.wait(WAIT_S):
        follower.read()
        follower.prefetch(None)
        if (fetched := follower.take()) is not None:
            return fetched
    return None
