"""A replay from its checkpoint to its last step: the run's steps up to where it was asked to begin,
then the others, under what was asked for.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from transformers.utils.logging import disable_progress_bar

from consumers.replay.batches import Course
from consumers.replay.recorded import RecordedSteps
from consumers.replay.training import TERM, Output, Replay
from consumers.trainer.learner import Learner
from consumers.trainer.ledger import Ledger
from consumers.trainer.pins import HeldVersions
from consumers.trainer.publisher import Publisher
from consumers.trainer.versions import VersionWriter
from rollstream.config import Configuration, fingerprint
from rollstream.folder import RunFolder, model_folder, run_log, store_url
from rollstream.replaying import Asked, courses
from rollstream.revision import code_revision
from rollstream.roles import set_threads
from rollstream.train_role import small_files
from storage.checkpoints import CheckpointId, newest_checkpoint
from storage.connect import open_store
from storage.metrics import MetricsFile
from storage.model import load_model
from storage.objects import ObjectStore
from streams.bus import Bus
from streams.records import Configured, Position, StepDone
from streams.topics import catalogue
from streams.writer import FencedWriter


@dataclass(frozen=True, slots=True)
class Start:
    """Where training begins: a checkpoint, or (None) the model of step 0."""

    checkpoint: CheckpointId | None
    step: int


def find_start(store: ObjectStore, asked: Asked) -> tuple[Start, Learner]:
    """The learner of the newest kept checkpoint up to the first step asked for."""
    disable_progress_bar()  # of transformers: it would stand between our lines
    set_threads(asked.before.trainer.threads)
    model = load_model(str(model_folder(asked.before, asked.folder.path)))
    learner = Learner(model, asked.before.trainer)
    found = newest_checkpoint(store, asked.first).checkpoint
    if found is None:
        return Start(None, 0), learner
    learner.load_state(found.tensors)
    return Start(found.id, found.id.step), learner


def replayed(
    source: Bus,
    recorded: RecordedSteps,
    asked: Asked,
    start: Start,
    learner: Learner,
    out: tuple[RunFolder, Configuration],
) -> Iterator[StepDone]:
    """Each step as it is trained; everything is in the folder when this ends."""
    own, wanted = courses(asked)
    with _output(*out, start, learner) as output:
        replay = Replay(source, recorded, output, time.monotonic)
        first = asked.first if asked.is_experiment else asked.last
        with closing(learner):
            steps = range(start.step + 1, first + 1)
            yield from replay.train(learner, own, steps, asked.last)
            state = learner.state()
        if asked.is_experiment:
            with closing(_changed(asked, wanted)) as changed:
                changed.load_state(state)
                steps = range(first + 1, asked.last + 1)
                yield from replay.train(changed, wanted, steps, asked.last)


def _changed(asked: Asked, course: Course) -> Learner:
    model = load_model(str(model_folder(asked.before, asked.folder.path)))
    return Learner(model, course.settings)


@contextmanager
def _output(
    folder: RunFolder, c: Configuration, start: Start, learner: Learner
) -> Generator[Output]:
    bus = run_log(c, folder.path)
    try:
        bus.create(catalogue())
        store = open_store(store_url(c, folder.path), c.sync)
        writer = FencedWriter(bus, "weights", "trainer", TERM)
        files = small_files(model_folder(c, folder.path))
        versions = VersionWriter(store, writer, c.run, TERM, c.weights, files, HeldVersions(bus))
        versions.open()
        versions.publish(start.step, learner.snapshot(c.weights.dtype))
        ledger = Ledger(bus, TERM)
        ledger.open(Position())
        configured = Configured(fingerprint(c), code_revision(), start.step)
        ledger.append([configured])
        with MetricsFile(folder.metrics / "trainer.jsonl") as metrics:
            publisher = Publisher(store, versions, ledger, metrics, c.checkpoints.keep)
            yield Output(publisher, ledger, c.weights.dtype, c.checkpoints.every, configured)
            publisher.close()
    finally:
        bus.close()


def differing(
    done: Iterable[StepDone], recorded: RecordedSteps, up_to: int, tell: Callable[[StepDone], None]
) -> list[int]:
    """Train to the end; the steps up to `up_to` whose hash is none of the ledger's."""
    wrong: list[int] = []
    for one in done:
        tell(one)
        if one.step <= up_to and one.state_hash not in recorded.hashes(one.step):
            wrong.append(one.step)
    return wrong
