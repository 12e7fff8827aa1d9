"""Executes a fetch plan on tensors of this process, in place. Stored bytes are compared with their
hash before anything is written. Memory beyond the tensors is two ranges of a file.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from rollstream.errors import CorruptObject
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.storage.weights.delta.codec import apply_tensor
from rollstream.storage.weights.delta.coding import Changes
from rollstream.storage.weights.fetch_plan import FetchPath, FetchStep
from rollstream.storage.weights.manifest import version_folder
from rollstream.storage.weights.shards import FetchRange, plan_ranges, wrong_tensor
from rollstream.storage.weights.tensors import tensor_bytes, tensor_hash
from rollstream.streams.values import Version


@dataclass(slots=True)
class FetchOutcome:
    """Reports a fetch by the tensors' names. The caller plans other paths for the tensors in
    `failed`, without the steps in `broken`.
    """

    changes: dict[str, list[Changes]] = field(default_factory=dict[str, list[Changes]])
    """The elements that deltas replaced, an item per delta; [] without steps. No key if a step
    replaced all or more than half of the elements.
    """
    failed: dict[str, CorruptObject] = field(default_factory=dict[str, CorruptObject])
    """Tensors that differ from the wanted ones, each with the reason."""
    broken: set[tuple[Version, str, bool]] = field(default_factory=set[tuple[Version, str, bool]])
    """Steps (`FetchStep.key`) not to be used again: those with wrong stored bytes, and all steps of
    a path that needed no held tensor and led to a wrong one.
    """
    fetched_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Requests one range of a file of `version` with the bytes of the tensors `range.names`;
    `steps` maps these, among others, to their steps.
    """

    version: Version
    range: FetchRange
    steps: Mapping[str, FetchStep]


def execute_fetch(
    store: ObjectStore, paths: Mapping[str, FetchPath], tensors: Mapping[str, torch.Tensor]
) -> FetchOutcome:
    """Execute the path of each tensor. `tensors` have the wanted version's dtypes and shapes
    already.

    A tensor of which any bytes do not match their hash is in the outcome's `failed` and has
    undefined content. Errors of the store are raised; then all tensors may have undefined content.
    """
    outcome = FetchOutcome(changes={name: [] for name in paths})
    for request, data in fetched(store, fetch_requests(paths)):
        outcome.fetched_bytes += len(data)
        for name in request.range.names:
            if name in outcome.failed:
                continue
            step = request.steps[name]
            at = step.start - request.range.start
            try:
                part = data[at : at + step.end - step.start]
                _note(outcome, name, _apply(paths[name], step, part, tensors[name]))
            except CorruptObject as error:
                outcome.failed[name] = error
                outcome.broken.add(step.key)
    for name in paths.keys() - outcome.failed.keys():
        try:
            _check(paths[name], tensors[name])
        except CorruptObject as error:
            outcome.failed[name] = error
            if paths[name].steps[0].is_whole:
                # The path began with no held tensor.
                outcome.broken.update(step.key for step in paths[name].steps)
    return outcome


def _note(outcome: FetchOutcome, name: str, changes: Changes | None) -> None:
    if changes is None:
        # Replaced elements are not listed.
        outcome.changes.pop(name, None)
    elif name in outcome.changes:
        outcome.changes[name].append(changes)


def fetch_requests(paths: Mapping[str, FetchPath]) -> Iterator[FetchRequest]:
    """Yield the requests for the bytes of all steps; steps without bytes need none."""
    groups: dict[tuple[Version, bool], dict[str, FetchStep]] = {}
    for name, path in paths.items():
        for step in path.steps:
            if step.end > step.start:
                groups.setdefault((step.version, step.delta is None), {})[name] = step
    # Older versions first: a delta is applied to the result of the steps before it.
    for (version, _), steps in sorted(groups.items(), key=lambda item: item[0]):
        for request in plan_ranges(steps):
            yield FetchRequest(version, request, steps)


def fetched(
    store: ObjectStore, requests: Iterable[FetchRequest]
) -> Iterator[tuple[FetchRequest, memoryview]]:
    """Yield each request with its bytes, in order; a thread fetches the next one meanwhile."""

    def get(request: FetchRequest) -> bytes:
        key = f"{version_folder(request.version)}/{request.range.file}"
        return store.get(key, request.range.start, request.range.end)

    before: tuple[FetchRequest, Future[bytes]] | None = None
    with ThreadPoolExecutor(1, "fetch") as pool:
        for request in requests:
            present = before
            before = request, pool.submit(get, request)
            if present is not None:
                yield present[0], memoryview(present[1].result())
        if before is not None:
            yield before[0], memoryview(before[1].result())


def _apply(
    path: FetchPath, step: FetchStep, part: memoryview, tensor: torch.Tensor
) -> Changes | None:
    check_stored(path, step, part)
    into = tensor_bytes(tensor)
    if step.delta is not None:
        return apply_tensor(step.delta.coding, step.delta.values, part, into, step.entry.dtype)
    into[:] = part
    return None


def check_stored(path: FetchPath, step: FetchStep, part: memoryview) -> None:
    """Raise `CorruptObject` unless `part`, a delta's payload or a complete tensor, has the step's
    hash, and the step's tensor has the size and dtype of the wanted one.
    """
    entry, delta = step.entry, step.delta
    key = f"{version_folder(step.version)}/{step.file}"
    if entry.bytes != path.entry.bytes or entry.dtype != path.entry.dtype:
        raise CorruptObject(f"tensor {step.name} in object {key} has another size than its child")
    if delta is not None:
        is_right = content_hash(part) == delta.payload
    else:
        is_right = len(part) == entry.bytes
        is_right = is_right and tensor_hash(entry.dtype, entry.shape, part) == entry.hash
    if not is_right:
        raise wrong_tensor(step.name, key)


def _check(path: FetchPath, tensor: torch.Tensor) -> None:
    entry = path.entry
    # A complete tensor was compared before it was written.
    if not path.steps or (path.steps[-1].delta is None and entry.bytes):
        return
    if tensor_hash(entry.dtype, entry.shape, tensor_bytes(tensor)) != entry.hash:
        last = path.steps[-1]
        raise CorruptObject(
            f"tensor {path.name} is not that of version {last.version} after its delta was "
            "applied: its memory had changed before, or the delta was made from another base"
        )
