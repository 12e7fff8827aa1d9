"""A scorer with the run's reference policy (`scoring.function = "reference"`), which annotates
log-probabilities, computed with the trainer's type, device and threads. A trajectory that cannot be
scored is annotated with the reason, so its group does not wait.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rollstream.consumers.credit import scored_reference
from rollstream.consumers.objective_settings import named_version
from rollstream.consumers.objectives.policies.other_policies import FrozenPolicy, load_reference
from rollstream.consumers.objectives.policies.reference_scores import ReferenceScorer
from rollstream.consumers.trainer.learn.forward import scoring_form
from rollstream.consumers.trainer.learn.paced import PacedModel
from rollstream.consumers.trainer.past_versions import PublishedVersions
from rollstream.errors import ConfigurationError
from rollstream.producers.rewards.pool import RewardVerdict
from rollstream.producers.scoring.scorer import WINDOW_PER_PROCESS, AnnotationPlan, Scorer
from rollstream.run.config.run_model import model_folder
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import RoleContext, set_torch_threads, training_bounds
from rollstream.run.roles.train import starting_model
from rollstream.storage.model_folder.hf_folder import hf_vocabulary_size
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.streams.admissible import REFERENCE_LOGPROBS, TrainingBounds, refusal
from rollstream.streams.records import Trajectory

# Between two reads of the pointer while trajectories wait for a version.
BELIEVED_S = 0.5


def build_reference_scorer(context: RoleContext) -> Scorer:
    """Raises `ConfigurationError` for a reference that cannot be loaded or lacks tokens of the
    trained model.
    """
    c = context.configuration
    set_torch_threads(c.trainer.threads)
    vocabulary = hf_vocabulary_size(model_folder(c, context.folder))
    past = PublishedVersions(lambda: (context.store,), c.weights.dtype)

    def believed() -> int:
        pointer = believed_pointer(context.store)
        return pointer.version.number if pointer and pointer.version else -1

    scorer = ReferenceScorer(
        scored_reference(c.trainer), lambda: _open_policy(context, past, vocabulary), believed
    )
    bounds = training_bounds(c, vocabulary)
    pool = ReferencePool(scorer, bounds, c.scoring.timeout_s, context.stop.wait)
    names = (REFERENCE_LOGPROBS,)
    return Scorer(context.bus, pool, AnnotationPlan(names, False, context.name), WINDOW_PER_PROCESS)


def _open_policy(
    context: RoleContext, past: PublishedVersions, vocabulary: int | None
) -> FrozenPolicy:
    c: Configuration = context.configuration
    name, form = scored_reference(c.trainer), scoring_form(c.trainer)
    if named_version(name, 0) is None:
        return FrozenPolicy(load_reference(name, vocabulary or 0), name, form, past)
    model = starting_model(c, context.folder)
    if isinstance(model, PacedModel):
        raise ConfigurationError(
            "scoring.function must not be 'reference' with trainer.learner = 'paced': no model is "
            "trained"
        )
    return FrozenPolicy(model, name, form, past)


@dataclass(slots=True)
class ReferencePool:
    """Gives one verdict for each trajectory, one a `poll`, in the order of submission among those
    whose reference exists. `wait` waits for that many seconds, or until the role is stopped.
    """

    scorer: ReferenceScorer
    bounds: TrainingBounds
    timeout_s: float
    """Then a trajectory of a version that is not believed gets no score."""
    wait: Callable[[float], object]
    clock: Callable[[], float] = time.monotonic
    _waiting: deque[tuple[Trajectory, float]] = field(
        default_factory=deque[tuple[Trajectory, float]]
    )

    def submit_record(self, record: Trajectory) -> None:
        self._waiting.append((record, self.clock()))

    def poll(self) -> list[tuple[str, RewardVerdict]]:
        for at, (record, since_s) in enumerate(self._waiting):
            verdict = self._verdict(record, since_s)
            if verdict is not None:
                del self._waiting[at]
                return [(record.trajectory, verdict)]
        if self._waiting:
            self.wait(BELIEVED_S)
        return []

    def close(self) -> None:
        """Drops unscored trajectories; a successor reads them again."""
        self._waiting.clear()

    def _verdict(self, record: Trajectory, since_s: float) -> RewardVerdict | None:
        refused = refusal(record, self.bounds)
        # By the trainer, too.
        if refused is not None:
            return RewardVerdict(reason=str(refused))
        if not self.scorer.is_ready(record):
            # The record's reference does not exist yet.
            if self.clock() < since_s + self.timeout_s:
                return None
            reason = f"no such version was believed within {self.timeout_s:g} s"
            return RewardVerdict(reason=reason)
        try:
            logprobs = self.scorer.score(record)
        # Its version is not stored any more.
        except ConfigurationError as error:
            return RewardVerdict(reason=str(error)[:300])
        if np.isnan(logprobs).any():
            return RewardVerdict(reason="the reference gives no number for one of its tokens")
        return RewardVerdict(vectors={REFERENCE_LOGPROBS: logprobs})
