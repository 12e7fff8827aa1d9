"""Offline training on trajectories from archives and JSON lines: they are gathered into a log of
the folder's own and trained there like the recorded steps of a run, by the same learner.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from rollstream.config.run_folder import RunFolder, open_run_log_for_writing
from rollstream.config.settings import Configuration
from rollstream.consumers.replay.offline_log import GatherRules, LabelledSource, gather_sources
from rollstream.consumers.replay.offline_steps import OfflinePlan, groups_used, index_log
from rollstream.consumers.replay.recorded_steps import ReplayCourse
from rollstream.consumers.replay.training import BehaviourModel, ReplayTrainer
from rollstream.consumers.trainer.data.prepare import training_rule
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.roles.context import set_torch_threads
from rollstream.runs.replay_output import (
    ReplayProgress,
    newest_replay_checkpoint,
    open_replay_output,
    read_own_ledger,
)
from rollstream.storage.models import load_model
from rollstream.streams.admissible import TrainingBounds
from rollstream.streams.records import StepDone, Trajectory
from rollstream.streams.topics import catalogue


@dataclass(slots=True)
class OfflineTraining:
    """One offline training; `left_over` is set once its steps are done."""

    folder: RunFolder
    configuration: Configuration
    left_over: int = 0

    @property
    def course(self) -> ReplayCourse:
        """Settings and rule; lag has no meaning here, because no version of this training made the
        trajectories.
        """
        return ReplayCourse(
            self.configuration.trainer, training_rule(self.configuration.trainer, None, False)
        )

    def gather(self, sources: Sequence[LabelledSource]) -> Counter[str]:
        """Copy all wanted trajectories into the folder's own log; returns the counts."""
        disable_progress_bar()
        set_torch_threads(self.configuration.trainer.threads)
        model: list[BehaviourModel] = []

        def fill(record: Trajectory) -> Trajectory:
            if not model:
                model.append(BehaviourModel(load_model(str(self._model))))
            return model[0].fill(record)

        with closing(open_run_log_for_writing(self.configuration, self.folder.path)) as log:
            log.create(catalogue())
            rules = GatherRules(TrainingBounds(self.vocabulary), fill)
            return gather_sources(sources, log, rules, str(self.folder.path))

    def train(self) -> Iterator[StepDone]:
        """Train from the folder's newest checkpoint on, as far as the trajectories suffice; yields
        the steps.
        """
        c = self.configuration
        disable_progress_bar()
        set_torch_threads(c.trainer.threads)
        learner = TorchLearner(load_model(str(self._model)), c.trainer)
        behind = newest_replay_checkpoint(self.folder, c) or ReplayProgress(0, {}, None)
        if behind.ledger is not None:
            learner.load_state(behind.tensors)
        used = groups_used(read_own_ledger(self.folder, c), behind.step)
        with closing(open_run_log_for_writing(c, self.folder.path)) as log, closing(learner):
            index = index_log(log, self.course.rule.names)
            plan = OfflinePlan(log, index, self.course, used)
            with open_replay_output(self.folder, c, behind, learner) as written:
                replay = ReplayTrainer(log, written, time.monotonic)
                steps = plan.steps(behind.step, c.trainer.steps)
                yield from replay.train(learner, self.course, steps)
            self.left_over = plan.left_over

    @property
    def vocabulary(self) -> int:
        """Vocabulary size of the model."""
        found: Any = AutoConfig.from_pretrained(str(self._model))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return int(found.get_text_config().vocab_size)  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]

    def outcome(self) -> dict[str, Any]:
        """The number of steps done, of groups closed in them, and of groups that no step used."""
        ledger = read_own_ledger(self.folder, self.configuration)
        closed = {one.group for ones in ledger.closed.values() for one in ones}
        return {"steps": ledger.last(), "closed": len(closed), "left_over": self.left_over}

    @property
    def _model(self) -> Path:
        path = self.configuration.model.path
        assert path is not None
        return Path(path)
