"""Resolves the model that a run starts from: `model_folder` is the one place from which every role
and command takes the model's folder, and `task_settings` the one for the task's files.

The run's store decides which model it is (`storage/starting_model/`). A folder on this host is used
where it has the same files, else the store's files are kept in `RUN/model`; weights are read from
the store, by rows. A run that an earlier release began has no model in its store: then the folder
is that of `model.path`, or the one that the warm-up wrote.
"""

import logging
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rollstream.analysis.locate import RunLocation, url_inside
from rollstream.analysis.looking import open_run_store
from rollstream.config.settings import Configuration
from rollstream.errors import ConfigurationError
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.base import Option
from rollstream.producers.tasks.registry import task_paths
from rollstream.storage.hf_folder import (
    CONFIG,
    find_hf_folder,
    missing_checkpoint,
)
from rollstream.storage.hf_weights import check_hf_weights
from rollstream.storage.identity import read_identity
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
_days: dict[tuple[str, Path], str] = {}
"""The days on which the runs of this process began: roles ask for them several times."""


_looked_at: dict[Path, tuple[RunLocation, Path]] = {}


@contextmanager
def model_is_read(location: RunLocation) -> Generator[None]:
    """Read the model of the run in `location`, inside the block, as that of a run which may come
    from another user: nothing is written into the run's folder, whose model files are checked
    here, and files of the store are kept in a temporary folder.
    """
    assert location.folder is not None
    folder = location.files.path(MODEL)
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if not location.files.path(folder, entry.name).is_dir():
            location.files.file(folder, entry.name)
    with TemporaryDirectory(prefix="rollstream-model-") as cache:
        before = _looked_at.get(location.folder)
        _looked_at[location.folder] = location, Path(cache)
        try:
            yield
        finally:
            _looked_at.pop(location.folder, None)
            if before is not None:  # another block reads the same run
                _looked_at[location.folder] = before
            for key in [key for key in _found if key[1] == location.folder]:
                del _found[key]
            for key in [key for key in _days if key[1] == location.folder]:
                del _days[key]


def _cache(folder: Path) -> Path:
    """Returns the folder for the store's model files of the run in `folder`."""
    return _looked_at[folder][1] if folder in _looked_at else folder / MODEL


def _store(c: Configuration, folder: Path, url: str) -> ObjectStore:
    if folder in _looked_at:
        return open_run_store(_looked_at[folder][0])
    return open_store(url, c.sync)


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
        store = _store(c, folder, url)
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
    return local if found is None else found.host_folder("", local, _cache(folder))


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
    if task.template_date is None:
        task = task.model_copy(update={"template_date": _run_day(c, folder)})
    if task.tokenizer is None:
        task = task.model_copy(update={"tokenizer": str(model_folder(c, folder))})
    if found is None:
        return task
    model, cache, names = found, _cache(folder), found.manifest.task_files

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


def _run_day(c: Configuration, folder: Path) -> str | None:
    """Returns the day on which the run began; None before it has begun, and for older runs."""
    url = url_inside(c.store, folder)
    if (url, folder) not in _days:
        if url.startswith("file:") and not Path(url.removeprefix("file:")).is_dir():
            return None  # opening the store would make the folder
        identity = read_identity(_store(c, folder, url))
        if identity is None or not identity.day:
            return None
        _days[url, folder] = identity.day
    return _days[url, folder]


def adapter_folder(c: Configuration, folder: Path) -> Path | None:
    """Returns a folder on this host with the adapter that the run starts from; None if it starts
    with a new one.
    """
    if c.model.lora.path is None:
        return None
    given, found = Path(c.model.lora.path).expanduser(), run_model(c, folder)
    return given if found is None else found.adapter_folder(given, _cache(folder))


def model_source(c: Configuration, folder: Path) -> ModelSource | None:
    """Returns the model's files on this host; None if the model is not here. Files of the task that
    are not here, or too large to be stored, are left out.
    """
    local, tokenizer = local_model_folder(c, folder), c.task.tokenizer
    return source_in(c, local, tokenizer) if (local / CONFIG).is_file() else None


def source_in(c: Configuration, model: Path, tokenizer: str | None) -> ModelSource:
    """Returns the files of the model in this folder, with those of the configured task."""
    adapter = c.model.lora.path
    if adapter is not None and not Path(adapter).expanduser().is_dir():
        adapter = None  # the host that put the model has it
    given = {path: Path(path).expanduser() for path in task_paths(c.task)}
    files = {path: place for path, place in given.items() if place.is_file()}
    for path, place in files.items():
        if place.stat().st_size > TASK_BYTES_MAX:
            log.warning("%s is above %d bytes and not stored", path, TASK_BYTES_MAX)
    return ModelSource(
        model,
        tokenizer if tokenizer is not None and Path(tokenizer).expanduser().is_dir() else None,
        tuple(path for path, place in files.items() if place.stat().st_size <= TASK_BYTES_MAX),
        has_weights=c.has_model,
        adapter=adapter,
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
        "(config.json), or a Hub name in this machine's cache, because the run's store has no "
        f"model: {missing_checkpoint(c.model.path)}; a host that has the model uploads it with "
        "`rollstream put-model PATH CONFIG`"
    )


def check_starting_model(
    store: ObjectStore, c: Configuration, folder: Path
) -> ModelManifest | None:
    """Returns the manifest of the model in the run's store, None if there is none. Raises
    `ConfigurationError` if `model.path`, or a file of the task, is another one on this host.
    """
    manifest, source = read_model_manifest(store), model_source(c, folder)
    if manifest is not None and c.model.path is not None and source is not None:
        check_same_model(manifest, source)
    return manifest


def store_starting_model(
    store: ObjectStore,
    c: Configuration,
    folder: Path,
    progress: Callable[[str, int], None] = lambda name, size: None,
) -> ModelManifest | None:
    """Put the model on this host into the run's store, unless the store has it; returns its
    manifest. Returns None for a run that an earlier release began, which continues without.
    `progress` is as in `put_model`.

    Raises `ConfigurationError` if `model.path` names another model than the store's, or if there is
    no model at all.
    """
    manifest = check_starting_model(store, c, folder)
    if manifest is not None or has_versions(store):
        return manifest
    source = model_source(c, folder)
    if source is None:
        raise missing_model(c)
    return put_model(store, c.run, source, time.time(), progress)


def has_versions(store: ObjectStore) -> bool:
    """Returns whether the run has published a version."""
    pointer = read_pointer(store)
    return pointer is not None and pointer[0].version is not None
