"""A scorer as a role: the task's judge or the configured function behind a pool of processes."""

from rollstream.producers.rewards.pool import RewardPool
from rollstream.producers.scoring.annotate import AnnotationPlan
from rollstream.producers.scoring.function import load_function
from rollstream.producers.scoring.scorer import BATCH_PER_PROCESS, Scorer
from rollstream.roles.context import RoleContext
from rollstream.roles.run_task import load_run_task, task_settings


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
