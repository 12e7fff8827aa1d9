"""The relay as a role, and the stores of the roles beside it: rollouts read through it, the trainer
pushes to the chain. Without `[relay] enabled` both keep the store as it is.

A scorer as a role: the task's judge or the configured function behind a pool of processes.
"""

from dataclasses import replace
from pathlib import Path

from rollstream.producers.rewards.pool import RewardPool
from rollstream.producers.scoring.functions import load_function
from rollstream.producers.scoring.scorer import BATCH_PER_PROCESS, AnnotationPlan, Scorer
from rollstream.roles.context import RoleContext, load_run_task, task_settings
from rollstream.storage.relay.client import BandwidthLimiter
from rollstream.storage.relay.push import PushingStore
from rollstream.storage.relay.relay import Relay
from rollstream.storage.relay.settings import folder_for
from rollstream.storage.relay.store import RelayStore
from rollstream.storage.relay.topology import RelayDirectory


def build_relay(place: RoleContext) -> Relay:
    """This node's relay, under its next term."""
    settings = place.configuration.relay
    return Relay(place.bus, place.store, settings, place.name, _relay_folder(place))


def with_relay_reads(place: RoleContext) -> RoleContext:
    """The place with the node's relay in front of its store."""
    settings = place.configuration.relay
    if not settings.enabled:
        return place
    store = RelayStore(place.store, _relay_folder(place), settings.url)
    place.watch.offer(lambda: {"rollout_relay_bytes_total": store.relay_bytes})
    return replace(place, store=store)


def with_relay_push(place: RoleContext) -> RoleContext:
    """The place with the chain of relays behind its store."""
    settings = place.configuration.relay
    if not settings.enabled or not settings.push_bytes_max:
        return place
    directory, pace = (
        RelayDirectory(place.bus, settings.timeout_s),
        BandwidthLimiter(settings.send_bytes_per_s),
    )
    store = PushingStore(place.store, directory, settings.push_bytes_max, pace)
    place.watch.offer(store.figures)
    return replace(place, store=store)


def _relay_folder(place: RoleContext) -> Path:
    return folder_for(place.configuration.relay, place.folder)


def build_scorer(place: RoleContext) -> Scorer:
    """The scorer that goes on where its group's commits end."""
    c = place.configuration
    load_run_task(c, place.folder)  # a mistake is told at once, not at the first trajectory
    if c.scoring.function:
        load_function(c.scoring.function)
    limits = {
        "reward_timeout_s": c.scoring.timeout_s,
        "reward_processes": c.scoring.processes,
    }
    return Scorer(
        place.bus,
        RewardPool(
            task_settings(c, place.folder).model_copy(update=limits), function=c.scoring.function
        ),
        AnnotationPlan(c.scoring.names, not c.scoring.function, place.name),
        BATCH_PER_PROCESS * c.scoring.processes,
    )
