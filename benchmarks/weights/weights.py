"""From a trained step to a rollout that serves it: the cost to the trainer's step, the time until a
version is applied, and the pause in decoding.

`publish_to_applied_*`: the trainer's own writer publishes 500 MB of bf16 weights to a file store; a
rollout's own follower, in the same process, reads the announcement, moves its held tensors and
prepares them; the receiver is the torch engine's weight code with tensors served as the checkpoint
has them (no model runs). It ends when the receiver has them.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from benchmarks.case import Case
from benchmarks.weights.sides import Link, Receiver, Sides, large_tensors, nudged
from benchmarks.weights.step import measure_gap, measure_hashes, measure_stall
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.file import FileStore
from rollstream.storage.weights.delta.codec import apply_tensor, encode_tensor
from rollstream.storage.weights.delta.coding import Changes
from rollstream.storage.weights.shards import pack_tensors, plan_shards
from rollstream.storage.weights.tensors import DTYPE_NAMES, tensor_bytes, tensor_hash

Tensors = Mapping[str, torch.Tensor]

CHANGED = 0.01
LINK_BYTES_PER_S = 125e6  # 1 Gbit/s
FULL_MB, QUICK_MB = 500, 50


def cases(quick: bool) -> Iterator[Case]:
    """Yields the step first, then a version's way by delta and in full, then the gap between two
    tokens.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield measure_stall(quick)
        yield measure_hashes(quick)
        yield from _ways(QUICK_MB if quick else FULL_MB, 3 if quick else 5)
        yield measure_gap(quick)
    finally:
        torch.set_num_threads(threads)


def _ways(megabytes: int, pairs: int) -> Iterator[Case]:
    first = large_tensors(megabytes)
    note = f"{megabytes} MB of bf16, {CHANGED:.0%} changed; one process, no model run"
    with tempfile.TemporaryDirectory() as folder:
        delta, alone, tensors = _delta_way(Path(folder), first, pairs)
    yield _at_most("publish_to_applied_delta", delta, "encode + apply alone", alone, 1.3, note)
    with tempfile.TemporaryDirectory() as folder:
        full, alone = _full_way(Path(folder), tensors, pairs)
    reference = "write + read + two hashes alone"
    yield _at_most("publish_to_applied_full", full, reference, alone, 1.3, note)
    yield _slow_link(tensors, 1 if megabytes == FULL_MB else pairs, note)


def _delta_way(
    folder: Path, tensors: Tensors, pairs: int
) -> tuple[list[float], list[float], Tensors]:
    sides = Sides(FileStore(folder / "store"), folder / "bus", deltas=True)
    sides.start(tensors)
    found: list[float] = []
    alone: list[float] = []
    for number in range(pairs + 1):  # the first pair is not counted: it touches the memory pages
        new = nudged(tensors, CHANGED, number)
        alone.append(_coding(tensors, new))
        found.append(sides.publish_to_applied(new))
        tensors = new
    sides.close()
    return found[1:], alone[1:], tensors


def _coding(old: Tensors, new: Tensors) -> float:
    """Seconds of encoding with comparison, and of applying with the check of each tensor's hash and
    the receiver's own writing.
    """
    memory = {name: tensor.clone() for name, tensor in old.items()}
    receiver = Receiver(old)
    began = time.perf_counter()
    coded = {
        name: encode_tensor(tensor_bytes(old[name]), tensor_bytes(tensor), "BF16")
        for name, tensor in new.items()
    }
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    changes: dict[str, Changes | None] = {}
    for name, one in coded.items():
        into = tensor_bytes(memory[name])
        changes[name] = apply_tensor(one.coding, one.values, one.payload, into, "BF16")
        tensor_hash("BF16", tuple(memory[name].shape), into)
    receiver.patch(memory, changes)
    return seconds + time.perf_counter() - began


def _full_way(folder: Path, tensors: Tensors, pairs: int) -> tuple[list[float], list[float]]:
    sides = Sides(FileStore(folder / "store"), folder / "bus", deltas=False)
    sides.start(tensors)
    found: list[float] = []
    alone: list[float] = []
    for number in range(pairs + 1):
        tensors = nudged(tensors, CHANGED, 100 + number)
        alone.append(_storing(sides.store, tensors, number))
        found.append(sides.publish_to_applied(tensors))
    sides.close()
    return found[1:], alone[1:]


def _storing(store: ObjectStore, tensors: Tensors, number: int) -> float:
    """Seconds of writing and reading the files, and of hashing every tensor twice."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    shards = [
        pack_tensors({name: tensors[name] for name in names}, "shard")[0]
        for names in plan_shards(sizes, Sides.SHARD_BYTES)
    ]
    began = time.perf_counter()
    for place, data in enumerate(shards):
        store.create(f"alone/{number}/{place}", data)
    for place in range(len(shards)):
        store.get(f"alone/{number}/{place}")
    for _ in range(2):
        for tensor in tensors.values():
            shape = tuple(tensor.shape)
            tensor_hash(DTYPE_NAMES[tensor.dtype], shape, tensor_bytes(tensor))
    seconds = time.perf_counter() - began
    for place in range(len(shards)):
        store.delete(f"alone/{number}/{place}")
    return seconds


def _slow_link(tensors: Tensors, pairs: int, note: str) -> Case:
    """Both directions of the store at 1 Gbit/s; the ratio is how many times faster the delta is."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for deltas in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            link = Link(FileStore(Path(folder) / "store"), LINK_BYTES_PER_S)
            sides = Sides(link, Path(folder) / "bus", deltas)
            link.open = True
            sides.start(tensors)
            link.open = False
            for number in range(pairs + deltas):
                tensors = nudged(tensors, CHANGED, 200 + number)
                seconds[deltas].append(sides.publish_to_applied(tensors))
            sides.close()
    delta, full = statistics.median(seconds[True]), statistics.median(seconds[False])
    reference = "a full version over the same link, in seconds; the ratio is full / delta"
    ratio = full / delta
    name = "publish_to_applied_slow_link"
    return Case(name, delta, "s", reference, full, ratio, 10.0, ratio >= 10.0, note)


def _at_most(
    case: str,
    values: list[float],
    reference: str,
    references: list[float],
    goal: float,
    note: str,
) -> Case:
    """Seconds in pairs; met when the median ratio is at most `goal`."""
    ratios = sorted(v / r for v, r in zip(values, references, strict=True))
    ratio = statistics.median(ratios)
    spread = f"ratio {ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} pairs, at most the goal"
    value, base = statistics.median(values), statistics.median(references)
    return Case(case, value, "s", reference, base, ratio, goal, ratio <= goal, f"{spread}; {note}")
