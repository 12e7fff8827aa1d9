"""The relay and the scorer as roles, and the stores of roles beside a relay.

Rollouts read through their node's relay, the trainer pushes to the relay chain. Without `[relay]
enabled` the store is unchanged. A scorer is the task's reward or the configured function in a pool
of processes.
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


def run_relay(place: RoleContext) -> bool:
    """Serve versions until the role is stopped."""
    relay = build_relay(place)
    place.watch.offer(relay.metric_values, relay.readers)
    relay.run(place.stop)
    return False


def run_scorer(place: RoleContext) -> bool:
    """Annotate trajectories until the role is stopped."""
    scorer = build_scorer(place)
    place.watch.offer(scorer.metric_values)
    scorer.run(place.stop)
    return False


def build_relay(place: RoleContext) -> Relay:
    """This node's relay, under its next term."""
    settings = place.configuration.relay
    return Relay(place.bus, place.store, settings, place.name, _relay_folder(place))


def with_relay_reads(place: RoleContext) -> RoleContext:
    """The context with the node's relay in front of its store."""
    settings = place.configuration.relay
    if not settings.enabled:
        return place
    store = RelayStore(place.store, _relay_folder(place), settings.url)
    place.watch.offer(lambda: {"rollout_relay_bytes_total": store.relay_bytes})
    return replace(place, store=store)


def with_relay_push(place: RoleContext) -> RoleContext:
    """The context with a store that also pushes new versions to the relay chain."""
    settings = place.configuration.relay
    if not settings.enabled or not settings.push_bytes_max:
        return place
    directory, pace = (
        RelayDirectory(place.bus, settings.timeout_s),
        BandwidthLimiter(settings.send_bytes_per_s),
    )
    store = PushingStore(place.store, directory, settings.push_bytes_max, pace)
    place.watch.offer(store.metric_values)
    return replace(place, store=store)


def _relay_folder(place: RoleContext) -> Path:
    return folder_for(place.configuration.relay, place.folder)


def build_scorer(place: RoleContext) -> Scorer:
    """The scorer, which resumes at its group's committed positions."""
    c = place.configuration
    load_run_task(c, place.folder)  # errors raise here, not at the first trajectory
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
