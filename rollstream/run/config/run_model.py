"""Resolves the model that a run starts from.

The run's store decides which it is (`storage/starting_model/`). A folder on this host with the same
files is used, else the store's files are kept in `RUN/model`; weights are read from the store, by
rows. Without a model in the store (an earlier release's run) it is the folder of `model.path` or of
the warm-up.
"""

import logging
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rollstream.errors import ConfigurationError
from rollstream.look.query.locate import RunLocation, url_inside
from rollstream.look.query.looking import open_run_store
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.base import Option
from rollstream.producers.tasks.registry import task_paths
from rollstream.run.config.settings import Configuration
from rollstream.storage.identity import read_identity
from rollstream.storage.model_folder.hf_folder import CONFIG, find_hf_folder, missing_checkpoint
from rollstream.storage.model_folder.hf_weights import check_hf_weights
from rollstream.storage.starting_model.manifest import (
    ADAPTER,
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

# The model's folder in a run's folder.
MODEL = "model"
# The models found by this process; a run's model never changes.
_found: dict[tuple[str, Path, str | None], StoredModel] = {}
# The days on which the runs of this process began: roles ask for them several times.
_days: dict[tuple[str, Path], str] = {}


_looked_at: dict[Path, tuple[RunLocation, Path]] = {}


@contextmanager
def model_is_read(location: RunLocation) -> Generator[None]:
    """Inside the block the model of the run in `location` is read as another user's: nothing is
    written into its folder, whose model files are checked here; files of the store go to a
    temporary folder.
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
            # Another block reads the same run.
            if before is not None:
                _looked_at[location.folder] = before
            for key in [key for key in _found if key[1] == location.folder]:
                del _found[key]
            for key in [key for key in _days if key[1] == location.folder]:
                del _days[key]


def _cache(folder: Path) -> Path:
    return _looked_at[folder][1] if folder in _looked_at else folder / MODEL


def _store(c: Configuration, folder: Path, url: str) -> ObjectStore:
    if folder in _looked_at:
        return open_run_store(_looked_at[folder][0])
    return open_store(url, c.sync)


def local_model_folder(c: Configuration, folder: Path) -> Path:
    """Returns that of `model.path`, else the warm-up's. It need not exist."""
    return find_hf_folder(c.model.path) if c.model.path else folder / MODEL


def run_model(c: Configuration, folder: Path) -> StoredModel | None:
    """Returns the model in the run's store; None if it has none (yet)."""
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
    """Returns the model folder on this host, with configuration and tokenizer, every file verified,
    perhaps without weights.
    """
    stored_model, local = run_model(c, folder), local_model_folder(c, folder)
    return local if stored_model is None else stored_model.host_folder("", local, _cache(folder))


def has_local_weights(c: Configuration, folder: Path) -> bool:
    """Judges as far as the names of files on this host tell."""
    local = local_model_folder(c, folder)
    try:
        check_hf_weights(local)
    except ConfigurationError:
        return False
    return (local / CONFIG).is_file()


def whole_model_folder(c: Configuration, folder: Path, target: Path) -> Path:
    """Returns the whole model folder on this host, if need be `target`, with the store's files."""
    stored_model = run_model(c, folder)
    if stored_model is None:
        return local_model_folder(c, folder)
    return stored_model.whole_folder() or stored_model.write_folder(target)


def task_settings(c: Configuration, folder: Path) -> TaskSettings:
    """Returns the task settings with paths on this host, of the tokenizer's folder and of files in
    the run's store.
    """
    task, stored_model = c.task, run_model(c, folder)
    if task.template_date is None:
        task = task.model_copy(update={"template_date": _run_day(c, folder)})
    if task.tokenizer is None:
        task = task.model_copy(update={"tokenizer": str(model_folder(c, folder))})
    if stored_model is None:
        return task
    model, cache, names = stored_model, _cache(folder), stored_model.manifest.task_files

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
        tokenizer_folder = Path(str(task.tokenizer))
        changed["tokenizer"] = str(stored_model.host_folder(TOKENIZER, tokenizer_folder, cache))
    return task.model_copy(update=changed)


def _run_day(c: Configuration, folder: Path) -> str | None:
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
    """Returns the adapter folder of the adapter that the run starts from; None for a new one."""
    if c.model.lora.path is None:
        return None
    local, stored_model = Path(c.model.lora.path).expanduser(), run_model(c, folder)
    return (
        local if stored_model is None else stored_model.host_folder(ADAPTER, local, _cache(folder))
    )


def model_source(c: Configuration, folder: Path) -> ModelSource | None:
    """Returns None if the model is not on this host. Files of the task that are missing, or too
    large to be stored, are left out.
    """
    local, tokenizer = local_model_folder(c, folder), c.task.tokenizer
    return source_in(c, local, tokenizer) if (local / CONFIG).is_file() else None


def source_in(c: Configuration, model: Path, tokenizer: str | None) -> ModelSource:
    """Returns the files in this folder, with those of the configured task."""
    adapter = c.model.lora.path
    if adapter is not None and not Path(adapter).expanduser().is_dir():
        # The host that put the model has it.
        adapter = None
    places = {path: Path(path).expanduser() for path in task_paths(c.task)}
    files = {path: place for path, place in places.items() if place.is_file()}
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
    """Looks for the model in the run's store or on this host."""
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
    """The manifest in the run's store, None without one. Raises `ConfigurationError` if
    `model.path`, or a file of the task, is another one on this host.
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
    """Puts this host's model into the run's store, unless it has one; None for a run that an
    earlier release began. Raises `ConfigurationError` for another or no model.
    """
    manifest = check_starting_model(store, c, folder)
    if manifest is not None or has_versions(store):
        return manifest
    source = model_source(c, folder)
    if source is None:
        raise missing_model(c)
    return put_model(store, c.run, source, time.time(), progress)


def has_versions(store: ObjectStore) -> bool:
    pointer = read_pointer(store)
    return pointer is not None and pointer[0].version is not None
