"""Every family that Rollstream serves: the table of `docs/metrics.md` as values.

Roles offer plain numbers under these names without `PREFIX`; what is not here is not served, and
the exporter says so.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

PREFIX = "rollstream_"

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """One name; `label` distinguishes its series beside `run`, `role` and `name`."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    label: str = ""


def _families(kind: Kind, rows: Iterable[tuple[str, str, str] | tuple[str, str, str, str]]):
    return tuple(Family(row[0], kind, row[1], row[2], *row[3:]) for row in rows)


EVERY_ROLE = (
    *_families(
        "gauge",
        [
            ("role_turn_age_seconds", "s", "since the role's loop turned last"),
            ("lease_term", "term", "term of the lease that this process holds (invariant 7)"),
            (
                "reader_behind_records",
                "records",
                "between a reader's position and the end of the topic; in compacted topics "
                "offsets that no longer hold a record count",
                "topic",
            ),
        ],
    ),
    *_families(
        "counter",
        [
            ("lease_renewals_total", "renewals", "of that lease"),
            ("reader_dead_total", "records", "unreadable ones that this reader met", "topic"),
            ("reader_void_total", "records", "that the fence dropped (invariant 7)", "topic"),
            (
                "reader_lost_total",
                "positions",
                "truncated before drafts read on from there; they went on at the begin",
                "topic",
            ),
            (
                "log_follow_restarts_total",
                "restarts",
                "of the consumer that follows all topics of this process (Kafka)",
            ),
            (
                "log_follow_lost_total",
                "feeds",
                "of one topic each, that ended as their position was truncated (Kafka)",
            ),
            ("scrape_errors_total", "errors", "figures that could not be had; the log says why"),
        ],
    ),
)

PROMPTS = (
    *_families("counter", [("prompts_published_total", "prompts", "of the whole run")]),
    *_families(
        "gauge",
        [
            ("prompts_ahead", "prompts", "published and not admitted"),
            ("prompts_ahead_max", "prompts", "bound of the above"),
        ],
    ),
)

DISPATCH = (
    *_families(
        "counter",
        [
            ("dispatch_groups_admitted_total", "groups", "of the whole run"),
            ("dispatch_groups_trained_total", "groups", "of the whole run, by the ledger"),
            ("dispatch_groups_closed_total", "groups", "that left untrained, of the whole run"),
            ("dispatch_trajectories_completed_total", "trajectories", "first completions"),
            ("dispatch_trajectories_late_total", "trajectories", "completions nobody waited for"),
            (
                "dispatch_trajectories_again_total",
                "trajectories",
                "that start again from their prompt: work was thrown away",
            ),
            (
                "dispatch_trajectories_recalled_total",
                "trajectories",
                "that go on because a rollout loads their version from history",
            ),
            ("dispatch_orders_total", "orders", "appended, by what they ask", "kind"),
            ("dispatch_moves_total", "trajectories", "asked back, to go on elsewhere (repack)"),
            (
                "dispatch_rollouts_lost_total",
                "rollouts",
                "without a heartbeat for its time-out, or stuck",
            ),
            (
                "dispatch_records_refused_total",
                "records",
                "out of bounds, or not of a living attempt, name or term (invariant 12)",
                "topic",
            ),
        ],
    ),
    *_families(
        "gauge",
        [
            ("dispatch_groups_open", "groups", "admitted, and not complete, trained or closed"),
            ("dispatch_groups_admissible", "groups", "that the pace allows now (invariant 5)"),
            ("dispatch_trajectories_open", "trajectories", "of open groups, not finished"),
            ("dispatch_orders_in_force", "orders", "newest order of each open trajectory"),
            (
                "dispatch_rollouts",
                "rollouts",
                "with a heartbeat within its time-out, while any is heard",
            ),
            ("dispatch_prompts_waiting", "prompts", "read and not admitted"),
            ("dispatch_version_newest", "version", "newest announced version"),
        ],
    ),
)

ROLLOUT = (
    *_families(
        "counter",
        [
            ("rollout_tokens_generated_total", "tokens", "generated"),
            ("rollout_trajectories_total", "trajectories", "published, by their end", "finish"),
            (
                "rollout_chains_broken_total",
                "trajectories",
                "that started again from their prompt: nothing could go on from their partials",
            ),
            ("rollout_idle_seconds_total", "s", "with nothing to generate"),
            ("rollout_busy_seconds_total", "s", "CPU time in prefill and decode"),
            ("rollout_fetched_bytes_total", "bytes", "of weight versions fetched"),
            ("rollout_relay_bytes_total", "bytes", "of those, from the node's relay"),
            (
                "rollout_draft_tokens_total",
                "tokens",
                "guessed from history, and of those the right ones",
                "kind",
            ),
            (
                "rollout_draft_lookups_total",
                "drafts",
                "asked of the history, and found there",
                "kind",
            ),
            ("rollout_draft_lookup_seconds_total", "s", "asking it"),
            ("rollout_draft_passes_total", "passes", "that verified drafts"),
            ("rollout_draft_rows_total", "trajectories", "decoded in those passes, again in each"),
            ("rollout_draft_gained_tokens_total", "tokens", "that those passes gave"),
            ("rollout_draft_changes_total", "changes", "between plain steps and passes"),
        ],
    ),
    *_families(
        "gauge",
        [
            ("rollout_term", "term", "term of this rollout"),
            ("rollout_tokens_per_second", "tokens/s", "between its last two heartbeats"),
            ("rollout_slots", "slots", "sequences that are decoded together"),
            ("rollout_running", "trajectories", "in slots"),
            ("rollout_waiting", "trajectories", "ordered, without a slot yet"),
            ("rollout_kv_used_tokens", "tokens", "in the KV cache"),
            ("rollout_kv_capacity_tokens", "tokens", "that the KV cache holds"),
            ("rollout_version_held", "version", "that generates"),
            ("rollout_version_newest", "version", "newest announced version"),
            ("rollout_quota_left", "trajectories", "still to be drawn under this version"),
            ("rollout_health", "1", "1 for the state that it says it is in", "health"),
            ("rollout_rewards_outstanding", "trajectories", "waiting for reward or environment"),
            ("rollout_oldest_trajectory_age_seconds", "s", "of the oldest one in progress"),
        ],
    ),
    *_families(
        "histogram",
        [
            ("rollout_fetch_seconds", "s", "fetching and verifying a version"),
            ("rollout_apply_seconds", "s", "swapping to a version, while nothing is decoded"),
        ],
    ),
)

TRAINER = (
    *_families(
        "counter",
        [
            ("trainer_steps_total", "steps", "whose `StepDone` this term appended"),
            ("trainer_steps_repeated_total", "steps", "of the ledger trained again, as they were"),
            ("trainer_tokens_trained_total", "tokens", "with loss, in those steps"),
            ("trainer_tokens_masked_total", "tokens", "above `max_lag`, masked"),
            ("trainer_samples_trained_total", "trajectories", "trained"),
            ("trainer_samples_dropped_total", "trajectories", "above `max_lag`, dropped"),
            (
                "trainer_refused_total",
                "trajectories",
                "that cannot be trained (invariant 12)",
                "kind",
            ),
            ("trainer_groups_total", "groups", "by how they ended (invariant 1)", "outcome"),
            (
                "trainer_completions_total",
                "records",
                "that changed nothing: late, duplicate, malformed, misplaced",
                "kind",
            ),
            ("trainer_wait_seconds_total", "s", "waiting for data"),
            ("trainer_busy_seconds_total", "s", "CPU time in forward and backward passes"),
            ("trainer_pushed_bytes_total", "bytes", "sent to the head of the relays"),
            (
                "trainer_push_given_up_total",
                "objects",
                "that relays have to read from the bucket",
            ),
        ],
    ),
    *_families(
        "gauge",
        [
            ("trainer_step", "steps", "finished"),
            ("trainer_steps_wanted", "steps", "of the whole run"),
            ("trainer_version_published", "version", "newest believed version"),
            ("trainer_groups_open", "groups", "admitted, and neither trained nor closed"),
            ("trainer_groups_complete", "groups", "of those, with all their trajectories here"),
            ("trainer_oldest_group_age_seconds", "s", "of the oldest open group"),
            ("trainer_publish_waiting", "steps", "finished and not begun to be published"),
            ("trainer_last", "as in `trainer.jsonl`", "metrics of the newest step", "metric"),
        ],
    ),
    *_families(
        "histogram",
        [
            ("trainer_step_seconds", "s", "a step, waiting for data included"),
            ("trainer_publish_seconds", "s", "from snapshot to `StepDone`"),
            ("lag_steps", "tokens by steps", "trained tokens by their lag at consumption"),
        ],
    ),
)

EVALUATION = (
    *_families("counter", [("eval_versions_total", "versions", "evaluated by this process")]),
    *_families(
        "gauge",
        [
            ("eval_version", "version", "newest evaluated one"),
            ("eval_versions_due", "versions", "announced, due, and not evaluated"),
            ("eval_last", "as in `eval.jsonl`", "figures of the newest evaluation", "metric"),
        ],
    ),
)

ARCHIVE = (
    *_families(
        "counter",
        [
            ("archive_files_total", "files", "created by this process"),
            ("archive_bytes_total", "bytes", "of those files"),
            ("archive_records_total", "records", "in those files", "topic"),
            ("archive_lost_total", "files", "that another archive had created just before"),
        ],
    ),
    *_families(
        "gauge",
        [
            ("archive_behind_records", "records", "of the log that are in no file yet", "topic"),
            ("archive_pending_records", "records", "of those, read already", "topic"),
        ],
    ),
)

SCORE = (
    *_families(
        "counter",
        [
            ("score_trajectories_total", "trajectories", "scored, or dead: no score", "outcome"),
            ("score_annotations_total", "annotations", "published"),
        ],
    ),
    *_families(
        "gauge", [("score_behind_records", "records", "of `trajectories` not scored by any scorer")]
    ),
)

RELAY = (
    *_families(
        "counter",
        [
            ("relay_received_bytes_total", "bytes", "from the relay before it"),
            ("relay_pushed_bytes_total", "bytes", "from the trainer"),
            ("relay_bucket_bytes_total", "bytes", "from the bucket"),
            ("relay_sent_bytes_total", "bytes", "of objects, to relays and rollouts"),
            ("relay_wrong_total", "objects", "that differed from their hash or manifest"),
            ("relay_evicted_total", "versions", "that made room for newer ones"),
        ],
    ),
    *_families(
        "gauge",
        [
            ("relay_term", "term", "term of this relay"),
            ("relay_held_bytes", "bytes", "here, or reserved for what is coming"),
            ("relay_versions", "versions", "here whole and verified"),
            ("relay_version_newest", "version", "newest of those"),
            ("relay_place", "relays", "before it in the chain"),
        ],
    ),
)

SUPERVISOR = (
    *_families("counter", [("supervisor_restarts_total", "restarts", "of a role", "process")]),
    *_families("gauge", [("supervisor_process_up", "1", "1 while a role's process is", "process")]),
)

BY_ROLE: dict[str, tuple[Family, ...]] = {
    "every role": EVERY_ROLE,
    "prompts": PROMPTS,
    "dispatch": DISPATCH,
    "rollout": ROLLOUT,
    "train": TRAINER,
    "eval": EVALUATION,
    "score": SCORE,
    "archive": ARCHIVE,
    "relay": RELAY,
    "supervisor": SUPERVISOR,
}
"""Families by the role that offers them, in the order of the documentation."""

FAMILIES: dict[str, Family] = {
    family.name: family for families in BY_ROLE.values() for family in families
}
