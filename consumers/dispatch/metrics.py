"""The metrics of dispatch (`dispatch_metrics`)."""

from collections import Counter

from rollstream.consumers.dispatch.admission import AdmissionPace, admissible_now
from rollstream.consumers.dispatch.inbox import CHECKED_TOPICS, DispatchInbox
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.metric_values import MetricValues


def dispatch_metrics(
    state: DispatchState, inbox: DispatchInbox | None, pace: AdmissionPace, counts: Counter[str]
) -> MetricValues:
    """Returns the metrics of dispatch now; `counts` are `Dispatch.counts`."""
    kinds = "start", "resume", "release"
    admitted, closed, trained = state.admitted, state.closed, state.trained
    groups = list(state.groups.values())
    refused = Counter[str]() if inbox is None else inbox.refused
    return {
        "dispatch_groups_admitted_total": admitted,
        "dispatch_groups_trained_total": trained,
        "dispatch_groups_closed_total": closed,
        "dispatch_groups_open": len(groups),
        "dispatch_groups_admissible": admissible_now(pace, state),
        "dispatch_trajectories_open": sum(len(group.open) for group in groups),
        "dispatch_trajectories_completed_total": state.completed,
        "dispatch_trajectories_late_total": state.late,
        "dispatch_trajectories_released_total": state.released,
        "dispatch_trajectories_again_total": counts["again"],
        "dispatch_trajectories_recalled_total": counts["recalled"],
        "dispatch_orders_in_force": len(state.assignments),
        "dispatch_orders_total": {kind: counts[kind] for kind in kinds},
        "dispatch_moves_total": counts["moved"],
        "dispatch_rollouts": len(state.rollouts),
        "dispatch_rollouts_lost_total": counts["lost"],
        "dispatch_records_refused_total": {topic: refused[topic] for topic in CHECKED_TOPICS},
        "dispatch_prompts_waiting": 0 if inbox is None else inbox.prompts_waiting,
        "dispatch_version_newest": state.version.number,
    }
