"""The role `score`, which writes annotations about finished trajectories."""

from rollstream.producers.scoring.build import check_scoring, scorer_pool, window_size
from rollstream.producers.scoring.scorer import WINDOW_PER_PROCESS, AnnotationPlan, Scorer
from rollstream.run.config.run_model import task_settings
from rollstream.run.roles.context import RoleContext, await_model, load_run_task


def run_scorer(context: RoleContext) -> bool:
    """Writes late rewards as annotations until the role is stopped."""
    check_scoring(context.configuration.scoring)
    if not await_model(context):
        return False
    scorer = _build_scorer(context)
    context.watch.offer(scorer.metric_values)
    scorer.run(context.stop)
    return False


def _build_scorer(context: RoleContext) -> Scorer:
    c = context.configuration
    if c.scoring.holds_reference:
        from rollstream.run.roles.reference import build_reference_scorer

        return build_reference_scorer(context)
    # Errors raise here, not at the first trajectory.
    task = load_run_task(c, context.folder)
    return Scorer(
        context.bus,
        scorer_pool(c.scoring, task_settings(c, context.folder), task.tokenizer),
        AnnotationPlan(c.scoring.names, not c.scoring.function, context.name),
        window_size(c.scoring, WINDOW_PER_PROCESS),
    )
