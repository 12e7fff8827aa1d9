"""All metric families (Prometheus' term: a name, with type and meaning, for one or more series), by
role; docs/reference/metrics.md is made from this file. A role returns plain numbers by these names;
a missing name is not served, but logged and counted as an error.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

PREFIX = "rollstream_"
"""Of every metric's name."""

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """All series have the labels `run`, `role` and `name` (of the process), several of one process
    also the one named by `label`.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    label: str = ""


def _families(kind: Kind, rows: Iterable[tuple[str, str, str] | tuple[str, str, str, str]]):
    """Each row has name, unit, meaning and, optionally, label."""
    return tuple(Family(row[0], kind, row[1], row[2], *row[3:]) for row in rows)


# fmt: off
EVERY_ROLE = (
    *_families("gauge", [
        ("build_info", "1", "1, by the release; a label `revision` has the commit", "version"),
        ("role_running_since_seconds", "s",
         "Unix time since which the role offers all its metrics: it has started"),
        ("role_turn_age_seconds", "s", "time since the last iteration of the role's loop"),
        ("interpreter_allocations", "blocks",
         "blocks of memory that Python objects of the process occupy"),
        ("lease_term", "term", "term of the lease that this process holds (invariant 7)"),
        ("reader_behind_records", "records",
         "distance from a reader's position to the end of the topic; in compacted topics, "
         "offsets without a record count too; missing while the brokers do not answer", "topic"),
    ]),
    *_families("counter", [
        ("lease_renewals_total", "renewals", "renewals of the lease"),
        ("reader_dead_total", "records",
         "undecodable records that the reader dead-lettered", "topic"),
        ("reader_void_total", "records", "records dropped by the fence (invariant 7)", "topic"),
        ("reader_lost_total", "positions",
         "positions of the draft feed that were truncated before they were read; reading "
         "continued at the begin", "topic"),
        ("log_follow_restarts_total", "restarts",
         "restarts of the consumer that prefetches all topics of this process (Kafka)"),
        ("log_follow_lost_total", "feeds",
         "single-topic feeds that ended because their position was truncated (Kafka)"),
        ("scrape_errors_total", "errors",
         "metrics that could not be read at a scrape; the log contains the errors"),
        ("bus_appended_bytes_total", "bytes", "keys and values of appended records", "topic"),
        ("bus_read_bytes_total", "bytes", "keys and values of read records", "topic"),
        ("bus_in_doubt_total", "appends",
         "appends that failed, so that their records may be in the log or not"),
        ("bus_retries_total", "requests", "requests that a broker did not answer, so sent again"),
        ("store_bytes_total", "bytes", "bytes of objects, `read` and `written`", "kind"),
        ("store_in_doubt_total", "requests",
         "writes whose answer was lost, so that they may have taken effect"),
        ("store_retries_total", "requests",
         "requests that failed in a way that passes, so sent again"),
    ]),
    *_families("histogram", [
        ("bus_seconds", "s",
         "appends until they are durable (`append`), requests for positions (`positions`)",
         "operation"),
        ("store_seconds", "s",
         "operations of the store: `write`, `read`, `stat`, `list` (to the first object), `delete`",
         "operation"),
    ]),
)
PROMPTS = (
    *_families("counter", [
        ("prompts_published_total", "prompts", "prompts published in the whole run"),
    ]),
    *_families("gauge", [
        ("prompts_ahead", "prompts", "prompts published and not admitted"),
        ("prompts_ahead_max", "prompts", "bound of `prompts_ahead`"),
        ("prompts_rows", "rows", "rows of the task's data sets that were read"),
        ("prompts_rows_skipped", "rows", "rows among them that cannot be used and are skipped"),
    ]),
)
DISPATCH = (
    *_families("counter", [
        ("dispatch_groups_admitted_total", "groups", "groups admitted in the whole run"),
        ("dispatch_groups_trained_total", "groups",
         "groups trained in the whole run, by the ledger"),
        ("dispatch_groups_closed_total", "groups",
         "groups closed without training in the whole run"),
        ("dispatch_trajectories_completed_total", "trajectories", "first completions"),
        ("dispatch_trajectories_late_total", "trajectories",
         "completions that arrived after their trajectory or group had ended"),
        ("dispatch_trajectories_released_total", "trajectories",
         "trajectories released because enough others of their group had ended (task.redundancy)"),
        ("dispatch_trajectories_again_total", "trajectories",
         "trajectories that restart from their prompt: generated tokens are discarded"),
        ("dispatch_trajectories_recalled_total", "trajectories",
         "trajectories that resume because a rollout loads their old version"),
        ("dispatch_orders_total", "assignments", "assignments appended, by kind", "kind"),
        ("dispatch_moves_total", "trajectories",
         "trajectories released to resume on another rollout (repack)"),
        ("dispatch_rollouts_lost_total", "rollouts",
         "rollouts without a heartbeat for the time-out, or stuck"),
        ("dispatch_records_refused_total", "records",
         "records out of bounds, or of an attempt, name or term that is not current (invariant "
         "12)", "topic"),
    ]),
    *_families("gauge", [
        ("dispatch_groups_open", "groups", "groups admitted, and not complete, trained or closed"),
        ("dispatch_groups_admissible", "groups", "groups that may be admitted now (invariant 5)"),
        ("dispatch_trajectories_open", "trajectories", "unfinished trajectories of open groups"),
        ("dispatch_orders_in_force", "assignments",
         "open trajectories with an assignment in force"),
        ("dispatch_rollouts", "rollouts", "rollouts with a heartbeat within the time-out"),
        ("dispatch_prompts_waiting", "prompts", "prompts read and not admitted"),
        ("dispatch_version_newest", "version", "newest announced version"),
    ]),
)
ROLLOUT = (
    *_families("counter", [
        ("rollout_tokens_generated_total", "tokens", "tokens generated"),
        ("rollout_trajectories_total", "trajectories",
         "trajectories published, by finish", "finish"),
        ("rollout_records_refused_total", "records",
         "records that were not published because the log cannot hold them", "topic"),
        ("rollout_chains_broken_total", "trajectories",
         "trajectories that restarted from their prompt because their partials could not be "
         "resumed"),
        ("rollout_replies_retried_total", "replies",
         "replies of environments that failed and were asked for again"),
        ("rollout_idle_seconds_total", "s", "time without anything to generate"),
        ("rollout_busy_seconds_total", "s", "CPU time in prefill and decode"),
        ("rollout_fetched_bytes_total", "bytes", "bytes of weight versions fetched"),
        ("rollout_relay_bytes_total", "bytes",
         "part of `rollout_fetched_bytes_total` from the node's relay"),
        ("rollout_draft_tokens_total", "tokens",
         "draft tokens proposed (`guessed`) and accepted (`right`)", "kind"),
        ("rollout_draft_lookups_total", "drafts",
         "draft look-ups in the history (`asked`) and hits (`found`)", "kind"),
        ("rollout_draft_lookup_seconds_total", "s", "time spent in draft look-ups"),
        ("rollout_draft_passes_total", "passes", "forward passes that verified drafts"),
        ("rollout_draft_rows_total", "trajectories",
         "rows in those passes; a trajectory counts once per pass"),
        ("rollout_draft_gained_tokens_total", "tokens", "tokens generated by those passes"),
        ("rollout_draft_changes_total", "changes",
         "switches between plain steps and verifying passes"),
        ("rollout_agent_turns_total", "turns", "turns of agents generated"),
        ("rollout_agent_repeated_total", "requests",
         "requests of agents that got a stored answer"),
        ("rollout_agent_abandoned_total", "turns",
         "turns of agents that are not trained, because the restarted program took another way"),
        ("rollout_agent_forks_total", "turns", "turns that began a branch, by cause", "cause"),
        ("rollout_agent_seconds_total", "s",
         "time between turns (`waiting`) and from request to answer (`generating`)", "kind"),
        ("rollout_agent_failures_total", "episodes", "episodes of agents that failed"),
        ("rollout_agent_retried_total", "episodes",
         "episodes of agents that were tried again after a failure"),
        ("rollout_agent_broken_total", "turns",
         "turns and episodes of agents that ended because their texts could not be handled"),
        ("rollout_agent_refused_total", "requests", "refused requests of agents, by code", "code"),
    ]),
    *_families("gauge", [
        ("rollout_term", "term", "term of this rollout"),
        ("rollout_tokens_per_second", "tokens/s", "speed between its last two heartbeats"),
        ("rollout_slots", "slots", "sequences that are decoded together"),
        ("rollout_running", "trajectories", "trajectories in slots"),
        ("rollout_waiting", "trajectories", "trajectories assigned and without a slot yet"),
        ("rollout_parked", "trajectories",
         "dialogues that wait for their environment, without a slot"),
        ("rollout_kv_used_tokens", "tokens", "tokens in the KV cache, without parked ones"),
        ("rollout_kv_capacity_tokens", "tokens", "tokens that fit into the KV cache"),
        ("rollout_version_held", "version", "version that generates"),
        ("rollout_version_newest", "version", "newest announced version"),
        ("rollout_quota_left", "trajectories",
         "trajectories that it may still start under this version"),
        ("rollout_health", "1", "1 for the state that the rollout reports", "health"),
        ("rollout_rewards_outstanding", "trajectories",
         "trajectories that wait for a reward or an environment"),
        ("rollout_oldest_trajectory_age_seconds", "s", "age of the oldest trajectory in progress"),
        ("rollout_agent_episodes", "episodes", "open episodes of agents"),
    ]),
    *_families("histogram", [
        ("rollout_fetch_seconds", "s", "fetching and verifying a version"),
        ("rollout_apply_seconds", "s", "swapping to a version, during which no token is decoded"),
    ]),
)
TRAINER = (
    *_families("counter", [
        ("trainer_steps_total", "steps", "steps whose `StepDone` this term appended"),
        ("trainer_steps_repeated_total", "steps",
         "steps of the ledger that were trained again after a restart"),
        ("trainer_tokens_trained_total", "tokens", "tokens with loss in those steps"),
        ("trainer_tokens_masked_total", "tokens", "tokens masked because they are above `max_lag`"),
        ("trainer_samples_trained_total", "trajectories", "trajectories trained"),
        ("trainer_samples_dropped_total", "trajectories",
         "trajectories dropped because they are above `max_lag`"),
        ("trainer_refused_total", "trajectories",
         "trajectories that cannot be trained (invariant 12)", "kind"),
        ("trainer_groups_total", "groups", "groups by ending (invariant 1)", "outcome"),
        ("trainer_completions_total", "records",
         "completions without effect: late, duplicate, surplus, malformed, misplaced", "kind"),
        ("trainer_wait_seconds_total", "s", "time spent waiting for data"),
        ("trainer_busy_seconds_total", "s", "CPU time in forward and backward passes"),
        ("trainer_pushed_bytes_total", "bytes",
         "bytes that this rank sent to the first relay of the chain"),
        ("trainer_push_given_up_total", "objects",
         "objects whose push failed; relays read them from the bucket"),
    ]),
    *_families("gauge", [
        ("trainer_step", "steps", "steps finished"),
        ("trainer_steps_wanted", "steps", "steps of the whole run"),
        ("trainer_version_published", "version", "newest believed version"),
        ("trainer_groups_open", "groups", "groups admitted, and neither trained nor closed"),
        ("trainer_groups_complete", "groups", "open groups whose trajectories have all arrived"),
        ("trainer_oldest_group_age_seconds", "s", "age of the oldest open group"),
        ("trainer_publish_waiting", "steps", "finished steps whose publication has not started"),
        ("trainer_checkpoint_age_seconds", "s",
         "time since this process wrote a checkpoint, or since it started"),
        ("trainer_last", "as in `trainer.jsonl`", "metrics of the newest step", "metric"),
    ]),
    *_families("histogram", [
        ("trainer_step_seconds", "s", "duration of a step, waiting for data included"),
        ("trainer_publish_seconds", "s", "from snapshot to `StepDone`"),
        ("lag_steps", "tokens by steps", "trained tokens by their lag at consumption"),
    ]),
)
EVALUATION = (
    *_families("counter", [
        ("eval_versions_total", "versions", "versions evaluated by this process"),
    ]),
    *_families("gauge", [
        ("eval_version", "version", "newest evaluated version"),
        ("eval_versions_due", "versions", "announced versions that are due and not evaluated"),
        ("eval_last", "as in `eval.jsonl`", "metrics of the newest evaluation", "metric"),
    ]),
)
ARCHIVE = (
    *_families("counter", [
        ("archive_files_total", "files", "files created by this process"),
        ("archive_bytes_total", "bytes", "bytes of those files"),
        ("archive_records_total", "records", "records in those files", "topic"),
        ("archive_lost_total", "files", "files that another archive process had created first"),
        ("archive_merged_total", "files", "merged files that this process created"),
        ("archive_deleted_total", "files", "files deleted because a merged file holds their rows"),
    ]),
    *_families("gauge", [
        ("archive_behind_records", "records",
         "records of the log that are not in a file yet", "topic"),
        ("archive_pending_records", "records",
         "part of `archive_behind_records` that was read already", "topic"),
    ]),
)
SCORE = (
    *_families("counter", [
        ("score_trajectories_total", "trajectories",
         "trajectories scored, dead and without a score, or recorded before", "outcome"),
        ("score_annotations_total", "annotations", "annotations published"),
    ]),
    *_families("gauge", [
        ("score_behind_records", "records", "records of `trajectories` that no scorer has scored"),
    ]),
)
ENDPOINT = (
    *_families("counter", [
        ("endpoint_requests_total", "requests", "requests of agents forwarded to rollouts"),
        ("endpoint_repeated_total", "requests",
         "requests sent again because a rollout was gone or gave the episode up"),
    ]),
)
RELAY = (
    *_families("counter", [
        ("relay_received_bytes_total", "bytes", "bytes received from the previous relay"),
        ("relay_pushed_bytes_total", "bytes", "bytes received from the trainer"),
        ("relay_bucket_bytes_total", "bytes", "bytes read from the bucket"),
        ("relay_sent_bytes_total", "bytes", "bytes of objects sent to relays and rollouts"),
        ("relay_wrong_total", "objects", "objects that differed from their hash or manifest"),
        ("relay_evicted_total", "versions", "versions evicted for newer ones"),
    ]),
    *_families("gauge", [
        ("relay_term", "term", "term of this relay"),
        ("relay_held_bytes", "bytes", "bytes held or reserved"),
        ("relay_versions", "versions", "complete and verified versions held"),
        ("relay_version_newest", "version", "newest complete version held"),
        ("relay_place", "relays", "number of relays before it in the chain"),
    ]),
)
OBSERVE = (
    *_families("gauge", [
        ("concern", "1",
         "1 while this concern lasts, else 0; here `name` is the concern's (see the runbook)",
         "name"),
        ("run_step", "steps", "newest step in the ledger"),
        ("run_steps_wanted", "steps", "steps of the whole run"),
        ("run_over", "1", "1 once the run is complete, stopped or failed"),
        ("run_step_age_seconds", "s", "time since the newest step ended"),
        ("run_archive_age_seconds", "s", "age of the oldest record that is not archived"),
        ("run_archive_roll_seconds", "s", "the setting `archive.roll_s`"),
    ]),
    *_families("counter", [
        ("run_restarts_total", "restarts",
         "restarts of all processes by their terms, whatever started them again"),
    ]),
)
"""Of the whole run, from the process that observes it: the supervisor of a local run, elsewhere the
role `observe`.
"""
SUPERVISOR = (
    *_families("counter", [
        ("supervisor_restarts_total", "restarts", "restarts of a role", "process"),
    ]),
    *_families("gauge", [
        ("supervisor_process_up", "1", "1 while the role's process runs", "process"),
    ]),
)
# fmt: on

BY_ROLE: dict[str, tuple[Family, ...]] = {
    "every role": EVERY_ROLE,
    "prompts": PROMPTS,
    "dispatch": DISPATCH,
    "rollout": ROLLOUT,
    "train": TRAINER,
    "eval": EVALUATION,
    "score": SCORE,
    "archive": ARCHIVE,
    "endpoint": ENDPOINT,
    "relay": RELAY,
    "observe": OBSERVE,
    "supervisor": SUPERVISOR,
}
"""In the order of the documentation."""

FAMILIES: dict[str, Family] = {
    family.name: family for families in BY_ROLE.values() for family in families
}
