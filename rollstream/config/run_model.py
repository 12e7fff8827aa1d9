"""Resolves the model that a run starts from: `model_folder` is the one place from which every role
and command takes the model's folder, and `task_settings` the one for the task's files.

The run's store decides which model it is (`storage/starting_model/`). A folder on this host is used
where it has the same files, else the store's files are kept in `RUN/model`; weights are read from
the store, by rows. A run that an earlier release began has no model in its store: then the folder
is that of `model.path`, or the one that the warm-up wrote.
"""

import logging
import time
from pathlib import Path

from rollstream.analysis.locate import url_inside
from rollstream.config.settings import Configuration
from rollstream.errors import ConfigurationError
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.base import Option
from rollstream.producers.tasks.registry import task_paths
from rollstream.storage.hf_folder import (
    CONFIG,
    check_hf_weights,
    find_hf_folder,
    how_to_download,
)
from rollstream.storage.starting_model.manifest import (
    TASK_BYTES_MAX,
    TOKENIZER,
    ModelManifest,
    ModelSource,
    read_model_manifest,
)
from rollstream.storage.starting_model.put import check_same_model, put_model
from rollstream.storage.starting_model.reading import StoredModel
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.pointer import read_pointer

log = logging.getLogger(__name__)

MODEL = "model"
"""The name of the model's folder in a run's folder."""
_found: dict[tuple[str, Path, str | None], StoredModel] = {}
"""The models found by this process; a run's model never changes."""


def local_model_folder(c: Configuration, folder: Path) -> Path:
    """Returns the folder in which the starting model is on the host that has it: that of
    `model.path`, else the one that the warm-up writes into the run's folder. It need not exist.
    """
    return find_hf_folder(c.model.path) if c.model.path else folder / MODEL


def run_model(c: Configuration, folder: Path) -> StoredModel | None:
    """Returns the starting model in the run's store; None if the store has none (yet)."""
    url = url_inside(c.store, folder)
    key = (url, folder, c.model.path)
    if key not in _found:
        if url.startswith("file:") and not Path(url.removeprefix("file:")).is_dir():
            return None  # opening the store would make the folder
        store = open_store(url, c.sync)
        manifest = read_model_manifest(store)
        if manifest is None:
            return None
        folders = (local_model_folder(c, folder), folder / MODEL)
        _found[key] = StoredModel(store, manifest, tuple(dict.fromkeys(folders)))
    return _found[key]


def model_folder(c: Configuration, folder: Path) -> Path:
    """Returns a folder on this host with the configuration and the tokenizer of the starting model,
    every file verified. It need not have the weights (`run_model`).
    """
    found, local = run_model(c, folder), local_model_folder(c, folder)
    return local if found is None else found.host_folder("", local, folder / MODEL)


def has_local_weights(c: Configuration, folder: Path) -> bool:
    """Returns whether the whole model is on this host, as far as the names of its files tell."""
    local = local_model_folder(c, folder)
    try:
        check_hf_weights(local)
    except ConfigurationError:
        return False
    return (local / CONFIG).is_file()


def whole_model_folder(c: Configuration, folder: Path, target: Path) -> Path:
    """Returns a folder on this host with the whole starting model, weights too; if there is none,
    `target`, into which the store's files are written.
    """
    found = run_model(c, folder)
    if found is None:
        return local_model_folder(c, folder)
    return found.whole_folder() or found.write_folder(target)


def task_settings(c: Configuration, folder: Path) -> TaskSettings:
    """Returns the task's settings with paths on this host: the tokenizer's folder (the configured
    one, else the model's), and files of the task that the run's store has.
    """
    task, found = c.task, run_model(c, folder)
    if task.tokenizer is None:
        task = task.model_copy(update={"tokenizer": str(model_folder(c, folder))})
    if found is None:
        return task
    model, cache, names = found, folder / MODEL, found.manifest.task_files

    def here(options: dict[str, Option]) -> dict[str, Option]:
        stored = {
            key: str(model.host_file(names[value], Path(value), cache))
            for key, value in options.items()
            if isinstance(value, str) and value in names and names[value] != TOKENIZER
        }
        return options | stored

    changed: dict[str, object] = {"options": here(task.options)}
    changed["parts"] = tuple(
        part.model_copy(update={"options": here(part.options)}) for part in task.parts
    )
    if names.get(task.tokenizer or "") == TOKENIZER:
        given = Path(str(task.tokenizer))
        changed["tokenizer"] = str(found.host_folder(TOKENIZER, given, cache))
    return task.model_copy(update=changed)


def model_source(c: Configuration, folder: Path) -> ModelSource | None:
    """Returns the model's files on this host; None if the model is not here. Files of the task that
    are not here, or too large to be stored, are left out.
    """
    local, tokenizer = local_model_folder(c, folder), c.task.tokenizer
    return source_in(c, local, tokenizer) if (local / CONFIG).is_file() else None


def source_in(c: Configuration, model: Path, tokenizer: str | None) -> ModelSource:
    """Returns the files of the model in this folder, with those of the configured task."""
    files = [path for path in task_paths(c.task) if Path(path).is_file()]
    for path in files:
        if Path(path).stat().st_size > TASK_BYTES_MAX:
            log.warning("%s is above %d bytes and not stored", path, TASK_BYTES_MAX)
    return ModelSource(
        model,
        tokenizer if tokenizer is not None and Path(tokenizer).is_dir() else None,
        tuple(path for path in files if Path(path).stat().st_size <= TASK_BYTES_MAX),
        has_weights=c.trainer.learner != "paced",
    )


def has_model(store: ObjectStore, c: Configuration, folder: Path) -> bool:
    """Returns whether the model is in the run's store or on this host."""
    return model_source(c, folder) is not None or read_model_manifest(store) is not None


def missing_model(c: Configuration) -> ConfigurationError:
    """Returns the error for a model that is neither in the run's store nor on this host."""
    if c.model.path is None:
        return ConfigurationError(
            "the run has no model: its store has none, and the warm-up has made none here; start "
            "`rollstream run` or `rollstream warmup` with this configuration"
        )
    return ConfigurationError(
        f"model.path: {c.model.path!r} must be a folder with a Hugging Face checkpoint "
        "(config.json), or a Hub name in this machine's cache, because the run's store has no model"
        f"{how_to_download(c.model.path)}; a host that has the model uploads it with `rollstream "
        "put-model PATH CONFIG`"
    )


def store_starting_model(
    store: ObjectStore, c: Configuration, folder: Path
) -> ModelManifest | None:
    """Put the model on this host into the run's store, unless the store has it; returns its
    manifest. Returns None for a run that an earlier release began, which continues without.

    Raises `ConfigurationError` if `model.path` names another model than the store's, or if there is
    no model at all.
    """
    manifest, source = read_model_manifest(store), model_source(c, folder)
    if manifest is not None:
        if c.model.path is not None and source is not None:
            check_same_model(manifest, source)
        return manifest
    if has_versions(store):
        return None
    if source is None:
        raise missing_model(c)
    return put_model(store, c.run, source, time.time())


def has_versions(store: ObjectStore) -> bool:
    """Returns whether the run has published a version."""
    pointer = read_pointer(store)
    return pointer is not None and pointer[0].version is not None
