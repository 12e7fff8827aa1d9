"""Stores the model that a run starts from (`put_model`), copies it to another run's store, and
compares it with files on this host. Objects are only created, the manifest last (invariant 6): a
killed writer repeats the call, and of two writers the first decides.
"""

import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rollstream.errors import ConfigurationError, ObjectExists
from rollstream.storage.model_folder.hf_folder import TEMPLATES, is_small_file
from rollstream.storage.model_folder.hf_weights import INDEX
from rollstream.storage.starting_model.manifest import (
    ADAPTER,
    MODEL_KEY,
    TASK,
    TOKENIZER,
    ModelManifest,
    ModelSource,
    describe_model,
    is_same,
    is_weights,
    mapped_bytes,
    of_model,
    read_model_manifest,
    stored_bytes,
)
from rollstream.storage.starting_model.reading import StoredModel, has_block
from rollstream.storage.stores.base import Data, ObjectStore, content_hash
from rollstream.storage.stores.json_objects import encode_json
from rollstream.storage.weights.manifest import FileEntry

SAMPLED_TENSORS = 16


def put_model(
    store: ObjectStore,
    run: str,
    source: ModelSource,
    created_s: float,
    progress: Callable[[str, int], None] = lambda name, size: None,
) -> ModelManifest:
    """Store the model that the run starts from, and return its manifest; idempotent, also after an
    interruption. `progress` gets each file's name and size before its upload.

    Raises `ConfigurationError`, which names a file that differs, if the run has another model.
    """
    manifest = describe_model(source, run, created_s)
    present = read_model_manifest(store)
    # Of two writers A and B, on any hosts, each may be killed anywhere:
    # - A dies before its manifest: the run has no model. B, or A again, with the same model keeps
    #   A's objects, since their folder is the hash of all content; with another model it has
    #   another folder, and A's objects stay unread until `rm`.
    # - Both reach the manifest: one create wins. The other reads it, and is done if the models are
    #   the same, else refused.
    # - A dies after its manifest: the model is stored, and B finds it.
    # No pointer moves and no term is needed: there is nothing to believe before the first version.
    if present is None:
        paths = source.files()
        for entry in manifest.files:
            progress(entry.name, entry.bytes)
            with stored_bytes(entry.name, paths[entry.name]) as data:
                _create_once(store, manifest.key(entry.name), data)
        try:
            store.create(MODEL_KEY, encode_json(manifest))
            return manifest
        except ObjectExists:
            # Another process stored a model meanwhile.
            present = read_model_manifest(store)
            assert present is not None, "the model's manifest is never deleted"
    if present.digest != manifest.digest and not _is_of_earlier_release(present, manifest):
        raise _other_model(run, _first_difference(present.files, manifest.files))
    return present


def _is_of_earlier_release(present: ModelManifest, manifest: ModelManifest) -> bool:
    """Earlier releases stored no further chat templates and no paths with `~`, but files that no
    role reads, and a task's compressed table under its last suffix alone.
    """
    there = {_present_name(entry.name): entry.hash for entry in present.files}
    now = {_present_name(entry.name): entry.hash for entry in manifest.files}
    of_home = tuple(name for path, name in manifest.task_files.items() if path.startswith("~"))
    is_same = all(now.get(name) == there[name] for name in there if _is_read(name))
    return is_same and all(
        name in there
        or name.removeprefix(TOKENIZER).startswith(TEMPLATES)
        or name.startswith(tuple(map(_present_name, of_home)))
        for name in now
    )


def _present_name(name: str) -> str:
    return re.sub(r"\.\w+(?=\.(gz|zst)$)", "", name) if name.startswith(TASK) else name


def _is_read(name: str) -> bool:
    file_name = name.removeprefix(TOKENIZER)
    is_file = of_model(name) or name.startswith(TOKENIZER)
    return (
        not is_file
        or is_weights(file_name)
        or file_name == INDEX
        or "/" in file_name
        or is_small_file(file_name)
    )


def _other_model(run: str, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"run {run} began with another model, which is in its store: {name} differs, and a run "
        "keeps its model: put the former files back, or move this folder away and the store's are "
        "used; give this model to a new run (its own name and store)"
    )


def copy_model(source: ObjectStore, target: ObjectStore, run: str) -> ModelManifest | None:
    """Copy the starting model to another run's store; returns its manifest, None if there is none.
    Every file is verified.
    """
    manifest = read_model_manifest(source)
    if manifest is None:
        return None
    model = StoredModel(source, manifest)
    with tempfile.TemporaryDirectory() as folder:
        for entry in manifest.files:
            # Through a file: weights may be larger than the memory.
            path = Path(folder) / "file"
            model.write_file(entry, path)
            with mapped_bytes(path) as data:
                _create_once(target, manifest.key(entry.name), data)
    copy = replace(manifest, run=run)
    with suppress(ObjectExists):
        target.create(MODEL_KEY, encode_json(copy))
    return copy


def check_same_model(manifest: ModelManifest, source: ModelSource) -> None:
    """Raise `ConfigurationError` if files on this host differ from those of the run's model.
    Compares sizes, all small files and samples of the weights, not every byte.
    """
    for entry in manifest.files:
        path = source.folder / entry.name
        is_used = of_model(entry.name) and (is_weights(entry.name) or is_small_file(path.name))
        # Files that are not here do not count.
        if is_used and path.exists() and not _looks_same(path, entry):
            raise _other_model(manifest.run, entry.name)
    for name, path in source.files().items():
        if name.startswith(ADAPTER) and not is_same(path, manifest.entry(name)):
            raise _other_model(manifest.run, f"the adapter's file {path.name}")
    for task_file in source.task_files:
        name = manifest.task_files.get(task_file)
        if name is not None and not is_same(Path(task_file).expanduser(), manifest.entry(name)):
            raise ConfigurationError(
                f"run {manifest.run} began with another {task_file}, which is in its store, and a "
                "run keeps its data: put that file back, or take this one away and the store's is "
                "used; give this one to a new run (its own name and store)"
            )
    tensors = sorted(manifest.tensors.items(), key=lambda item: item[1].start - item[1].end)
    for name, tensor in tensors[:SAMPLED_TENSORS]:
        path = source.folder / tensor.file
        if tensor.blocks and path.exists() and not has_block(path, tensor, 0):
            raise _other_model(manifest.run, f"tensor {name}")


def _looks_same(path: Path, entry: FileEntry) -> bool:
    if is_weights(entry.name):
        return path.stat().st_size == entry.bytes
    with stored_bytes(entry.name, path) as data:
        return content_hash(data) == entry.hash


def _create_once(store: ObjectStore, key: str, data: Data) -> None:
    # An existing object's key has the hash of its content, and readers verify it.
    with suppress(ObjectExists):
        store.create(key, data)


def _first_difference(present: tuple[FileEntry, ...], files: tuple[FileEntry, ...]) -> str:
    other = {(entry.name, entry.hash) for entry in present} ^ {(e.name, e.hash) for e in files}
    return min((name for name, _ in other), default="the list of the task's files")
