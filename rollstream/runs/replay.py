"""A replay from its checkpoint to its last step: the run's steps up to where it was asked to begin,
then the others, under what was asked for.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from transformers.utils.logging import disable_progress_bar

from rollstream.consumers.replay.recorded_steps import RecordedSteps
from rollstream.consumers.replay.training import ReplayTrainer
from rollstream.consumers.trainer.learn.base import Learning, open_learner
from rollstream.config.settings import Configuration
from rollstream.config.run_folder import RunFolder
from rollstream.runs.replay_output import ReplayProgress, newest_replay_checkpoint, open_replay_output, read_own_ledger
from rollstream.runs.replaying import ReplayRequest, replay_courses
from rollstream.roles.context import set_torch_threads
from rollstream.roles.initial_model import starting_model
from rollstream.storage.checkpoints import newest_checkpoint
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.distributed import local_tensors
from rollstream.streams.bus import Bus
from rollstream.streams.records import StepDone


@dataclass(frozen=True, slots=True)
class ReplayStart:
    """Where training begins: a checkpoint of the run by its name, or (None) the model of step 0;
    `behind` is that, or what an earlier process of this replay has done since.
    """

    checkpoint: str | None
    step: int
    behind: ReplayProgress

    def begun(self) -> dict[str, Any]:
        """What the folder says of it."""
        return {"checkpoint": self.checkpoint, "start": self.step}


def find_replay_start(
    store: ObjectStore,
    asked: ReplayRequest,
    before: Mapping[str, Any] | None,
    own: tuple[RunFolder, Configuration],
) -> tuple[ReplayStart, Learning]:
    """The learner of the folder's newest checkpoint if a replay was stopped there (`before` is what
    it noted), else of the newest kept one up to the first step asked for.
    """
    disable_progress_bar()  # of transformers: it would stand between our lines
    set_torch_threads(asked.before.trainer.threads)
    model = starting_model(asked.before, asked.folder.path)
    learner = open_learner(model, asked.before.trainer)
    done = newest_replay_checkpoint(*own) if before is not None else None
    if done is not None and before is not None:
        learner.load_state(done.tensors)
        return ReplayStart(before["checkpoint"], before["start"], done), learner
    found = newest_checkpoint(store, asked.first).checkpoint
    if found is None:
        return ReplayStart(None, 0, ReplayProgress(0, {}, None)), learner
    learner.load_state(found.tensors)
    return ReplayStart(str(found.id), found.id.step, ReplayProgress(found.id.step, {}, None)), learner


def run_replay(
    source: Bus,
    recorded: RecordedSteps,
    asked: ReplayRequest,
    start: ReplayStart,
    learner: Learning,
    out: tuple[RunFolder, Configuration],
) -> Iterator[StepDone]:
    """Each step as it is trained; everything is in the folder when this ends."""
    own, wanted = replay_courses(asked)
    done = start.behind.step
    with open_replay_output(*out, start.behind, learner) as written:
        replay = ReplayTrainer(source, written, time.monotonic)
        first = asked.first if asked.is_experiment else asked.last
        with closing(learner):
            steps = recorded.planned(range(done + 1, first + 1), asked.last)
            yield from replay.train(learner, own, steps)
            state = learner.state()
        if asked.is_experiment:
            with closing(_changed_learner(asked)) as changed:
                changed.load_state(local_tensors(state))
                steps = recorded.planned(range(max(done, first) + 1, asked.last + 1), asked.last)
                yield from replay.train(changed, wanted, steps)


def differing_steps(
    out: tuple[RunFolder, Configuration], recorded: RecordedSteps, first: int, last: int
) -> list[int]:
    """The steps from `first` to `last` whose hash in the folder's ledger is none of the run's."""
    again = read_own_ledger(*out)
    return [step for step in range(first, last + 1) if not _has_recorded_hash(again, recorded, step)]


def _has_recorded_hash(again: RecordedSteps, recorded: RecordedSteps, step: int) -> bool:
    """The last hash counts of a step that was trained twice in the folder."""
    return again.done[step][-1].state_hash in recorded.hashes(step)


def _changed_learner(asked: ReplayRequest) -> Learning:
    model = starting_model(asked.before, asked.folder.path)
    return open_learner(model, asked.now.trainer)
