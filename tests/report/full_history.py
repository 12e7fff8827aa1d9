"""A history that has everything a report can show: tasks, a critic, drafts, moves, failures, drops,
warnings, deaths, a fork's origin, pass@k.
"""

from msgspec.structs import replace

from rollstream.look.monitor.samples import DraftTotals, PassDrafts
from rollstream.look.monitor.snapshot import RunWarning
from rollstream.look.monitor.state import RequestMove
from rollstream.look.report.history import RunHistory
from rollstream.look.report.untrained import DropComparison, EpisodeComparison, FailedCause
from tests.support.synthetic_run import STARTED_S, STEP_S


def fill(history: RunHistory) -> RunHistory:
    """Returns the history of the synthetic run with everything that it lacks."""
    for step, record in history.steps.items():
        metrics = {
            **record.metrics, "value_loss": 1.0 / step, "explained_variance": step / 100,
            "reward_mean/sums": step / 60, "reward_mean/words": step / 90,
            "mismatch_mean/sums": 1e-6 * step, "mismatch_mean/words": 2e-6 * step,
            "gradient_norm": 2.0 / step,
        }  # fmt: skip
        history.steps[step] = replace(record, metrics=metrics)
    shares = {"full": 0.5, "direct": 0.2, "jump": 0.15, "words": 0.1, "other": 0.05}
    history.evaluations = [
        {
            **line, "pass_at/2": 0.3 + 0.01 * line["step"], "pass_at/4": 0.4 + 0.01 * line["step"],
            "accuracy_sampled/sums": 0.01 * line["step"], "accuracy_sampled/words": 0.5,
            "shares": shares,
        }
        for line in history.evaluations
    ]  # fmt: skip
    history.configuration = {**history.configuration, "trainer.steps": 80}
    history.forked_from = "first at step 3"
    history.moves = [
        RequestMove(STARTED_S + 10 * STEP_S, "rollout-0", "rollout-1", 3),
        RequestMove(STARTED_S + 12 * STEP_S, "rollout-1", "rollout-0", 1),
    ]
    history.concerns = [RunWarning("lag", "lag 4 is the largest that is trained", "more rollouts")]
    history.dropped = DropComparison(12, 480, 200.0, 20.0, 0.25, 0.5)
    history.episodes = EpisodeComparison(
        (FailedCause("timeout", 7, 2, 31.0), FailedCause("refused", 1, 0, 3.0)),
        8, 480, 5, 30.0, 20.0, 0.125, 0.5, 12.0, 48.0, 3,
    )  # fmt: skip
    history.drafts = [
        PassDrafts(number, task, DraftTotals(100 * number, 50, 40, 10 * number, 20, 12, 0.001))
        for number in (1, 2, 3)
        for task in ("sums", "words")
    ]
    return history
