"""The metrics of a rollout (`rollout_metrics`)."""

from rollstream.metric_values import MetricValue, MetricValues
from rollstream.producers.engines.base import DraftStats
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.streams.records import RolloutStatus

WRITTEN = ("trajectories", "partials", "applied", "status")  # topics of a rollout
FINISHES = ("stop", "length", "dead")  # how a trajectory can end


def rollout_metrics(
    publisher: RolloutPublisher, follower: WeightsFollower, judged: int, oldest_s: float
) -> MetricValues:
    """`oldest_s` is the age of the oldest running trajectory in seconds."""
    newest = follower.newest
    values: dict[str, MetricValue] = {
        "rollout_term": publisher.term,
        "rollout_trajectories_total": {name: publisher.finishes[name] for name in FINISHES},
        "rollout_records_refused_total": {name: publisher.refused[name] for name in WRITTEN},
        "rollout_rewards_outstanding": judged,
        "rollout_oldest_trajectory_age_seconds": max(0.0, oldest_s),
        "rollout_version_newest": 0 if newest is None else newest.version.number,
        "rollout_fetched_bytes_total": follower.fetched_bytes,
        "rollout_fetch_seconds": follower.fetch_s,
        "rollout_apply_seconds": publisher.apply_s,
    }
    values.update(_draft_metrics(publisher.drafts))
    if publisher.last_status is not None:
        values.update(_status_metrics(publisher.last_status))
    return values


def _draft_metrics(drafts: DraftStats) -> MetricValues:
    return {
        "rollout_draft_tokens_total": {"guessed": drafts.proposed, "right": drafts.accepted},
        "rollout_draft_lookups_total": {"asked": drafts.asked, "found": drafts.found},
        "rollout_draft_lookup_seconds_total": drafts.lookup_s,
        "rollout_draft_passes_total": drafts.passes,
        "rollout_draft_rows_total": drafts.rows,
        "rollout_draft_gained_tokens_total": drafts.gained,
        "rollout_draft_changes_total": drafts.changes,
    }


def _status_metrics(status: RolloutStatus) -> MetricValues:
    return {
        "rollout_slots": status.slots,
        "rollout_running": status.running,
        "rollout_waiting": status.waiting,
        "rollout_parked": status.parked,
        "rollout_kv_used_tokens": status.kv_used,
        "rollout_kv_capacity_tokens": status.kv_capacity,
        "rollout_version_held": status.version.number,
        "rollout_quota_left": status.quota_left,
        "rollout_health": {status.health: 1},
        "rollout_tokens_per_second": status.tokens_per_s,
        "rollout_tokens_generated_total": status.tokens_total,
        "rollout_idle_seconds_total": status.idle_s,
        "rollout_busy_seconds_total": status.busy_s,
    }
