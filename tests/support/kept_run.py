"""A finished tiny run as the command line sees it: folder, configuration, log, archive, store."""

from pathlib import Path

from rollstream.consumers.archive.service import ArchiveService
from rollstream.consumers.settings import ArchiveSettings
from rollstream.look.query.own_runs import remember_begun
from rollstream.producers.settings import SamplingSettings, TaskSettings
from rollstream.run.config.config import fingerprint
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration
from rollstream.storage.identity import read_or_create_identity
from rollstream.storage.settings import (
    CheckpointSettings,
    LoraSettings,
    ModelSettings,
)
from tests.support.tiny_run import DISPATCH, TinyRun, tiny_run

STEPS = 6
TASK = TaskSettings(name="tests.support.uneven_task:Uneven")
TOPICS = ArchiveSettings().topics


def made(
    folder: Path,
    *,
    archive: bool = False,
    truncate: bool = False,
    lora: LoraSettings | None = None,
    **trainer: object,
) -> Path:
    """Checkpoints after steps 4 and 6 are kept; with both, truncated records are archived. More
    settings are the `trainer`'s.
    """
    dispatch = DISPATCH.model_copy(update={"keep_s": 0.05})
    changed = {
        "trainer": {"steps": STEPS, **trainer},
        "checkpoint_every": 2,
        "dispatch": dispatch,
        "task": TASK,
        "lora": lora or LoraSettings(),
    }
    with tiny_run(folder, truncate=truncate, **changed) as run:
        run.archived = TOPICS if archive else ()
        write_configuration_of(run)
        run.start_all()
        if archive:
            service = ArchiveService(run.bus, run.store, "tiny", ArchiveSettings(roll_s=0.1))
            run.start_thread(lambda: service.run(run.stop))
        assert run.train()
    return folder


def write_configuration_of(run: TinyRun) -> None:
    """Makes the run's folder one that commands take; its trainer records this configuration. The
    user of this test began the run, as `rollstream run` would remember.
    """
    configuration = configuration_of(run)
    run.configuration_hash = fingerprint(configuration)
    write_configuration(RunFolder(run.folder), configuration)
    identity = read_or_create_identity(run.store, configuration.run)
    remember_begun(identity.id, configuration.model_dump(mode="json"), run.folder)


def configuration_of(run: TinyRun) -> Configuration:
    """The configuration of a tiny run whose roles are threads; its model is saved."""
    model = run.folder / "model"
    run.model().save_pretrained(model)
    return Configuration(
        run="tiny",
        folder=str(run.folder),
        model=ModelSettings(path=str(model), lora=run.lora),
        trainer=run.trainer,
        dispatch=run.dispatch,
        rollouts=run.rollout,
        task=run.task,
        sampling=SamplingSettings(tokens_max=run.tokens_max),
        weights=run.weights,
        checkpoints=CheckpointSettings(every=2),
    )
