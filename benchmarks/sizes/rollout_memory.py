"""Memory of a rollout while it takes a version, beyond its engine's own.

A version of 604 M bf16 parameters and a delta that changes 1 % of each tensor are written by one
process. Another opens the engine torch on the first version, as a rollout does, and applies the
second one (delta), then the first one again (an older version from history: complete tensors). The
value is the largest sample of anonymous and shared memory while it fetches, prepares, swaps and
compares, less the same just before. The spool is a file; pages of files do not count.

Where vLLM is installed, the same is done with that engine and two workers, whose memory is added.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import psutil
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from transformers import AutoConfig, PreTrainedConfig

from benchmarks.case import Case, alone
from benchmarks.sizes.rank_memory import FULL, QUICK, RankShape, write_model
from benchmarks.sizes.rank_process import SAMPLE_S, PeakMemory, private_bytes
from benchmarks.weights.sides import nudged
from rollstream.producers.engine_factory import open_engine
from rollstream.producers.engines.base import Engine
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.settings import VllmSettings
from rollstream.producers.engines.vllm.local.environment import installed_release
from rollstream.producers.rollout.read_back import FetchedWeights
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from testbed.repository import ROOT

GOAL = 256e6
CHANGED = 0.01
SHARD_BYTES = 64 << 20
DTYPES = ("float32", "bfloat16")
VLLM = "vllm"


def cases(quick: bool) -> Iterator[Case]:
    """Yields `rollout_memory`."""
    with tempfile.TemporaryDirectory() as folder:
        yield measure(Path(folder), QUICK if quick else FULL)


def measure(folder: Path, shape: RankShape) -> Case:
    """The peak beyond the engine's own of layers in fp32; those in bf16 are noted."""
    parameters = sum(write_model(shape.config(), folder / "model").values())
    _run("write", folder)
    kinds = (*DTYPES, VLLM) if installed_release() else DTYPES
    found = {kind: json.loads(_run("apply", folder, kind)) for kind in kinds}
    counted = [one for kind, one in found.items() if kind != "bfloat16"]
    value = max(one[what] for one in counted for what in ("delta", "full"))
    parts = "; ".join(
        f"{kind}{'' if kind == VLLM else ' layers'}: opening {one['open'] / 1e6:.0f}, "
        f"delta {one['delta'] / 1e6:.0f}, all tensors {one['full'] / 1e6:.0f}, "
        f"the engine {one['engine'] / 1e6:.0f} MB, pauses "
        f"{one['delta_pause_ms']:.0f} and {one['full_pause_ms']:.0f} ms"
        for kind, one in found.items()
    )
    note = f"{parameters / 1e6:.0f} M bf16 parameters; {parts}"
    return alone("rollout_memory", value, "B", at_most=GOAL, note=note)


def _run(*arguments: object) -> str:
    line = [sys.executable, "-m", "benchmarks.sizes.rollout_memory", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if VLLM in arguments:  # memory that a worker keeps of opening would hide what an update needs
        environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    return subprocess.run(
        line, check=True, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ).stdout


def write(folder: Path) -> None:
    """An anchor and a delta after it, believed and announced in this order."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted((folder / "model").glob("*.safetensors")):
        tensors |= load_file(file)
    store = open_store(f"file:{folder / 'store'}")
    first = NewVersion("run", Version(0, 1), tensors, {}, SHARD_BYTES, 0.0)
    parent = publish_version(store, first)
    changed = nudged(tensors, CHANGED, 0)
    second = NewVersion("run", Version(1, 1), changed, {}, SHARD_BYTES, 0.0)
    publish_version(store, second, parent, tensors, anchor_due=False)


def apply(folder: Path, kind: str) -> None:
    """Print the bytes beyond the engine's own while it opens and takes each version."""
    store, bus = open_store(f"file:{folder / 'store'}"), open_bus(f"sqlite:{folder / kind}")
    bus.create(catalogue(1))
    follower = WeightsFollower(bus, store)
    found_config = AutoConfig.from_pretrained(folder / "model")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    config = cast(PreTrainedConfig, found_config)
    memory = PeakMemory(with_workers)
    memory.begin("open")
    fetched = fetched_version(follower, Version(0, 1))
    tensors, options = fetched.update.tensors, EngineOptions(4, 128)
    engine = open_kind(kind, config, tensors, options)
    assert not engine.read_back(tensors, tensors).differing
    del fetched, tensors
    follower.prepare = engine.prepare
    # What the allocator keeps of opening would hide what an update needs.
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    own, found = with_workers(), dict[str, float]()
    found["open"] = memory.peaks["open"] - own
    for what, version in (("delta", Version(1, 1)), ("full", Version(0, 1))):
        memory.begin(what)
        fetched = fetched_version(follower, version)
        began = time.perf_counter()
        engine.update(fetched.update, "in_flight")
        found[f"{what}_pause_ms"] = 1e3 * (time.perf_counter() - began)
        follower.compare(fetched, engine.read_back, 0.0)
        del fetched
        while (verdict := follower.verdict()) is None:
            time.sleep(SAMPLE_S)
        assert verdict.compared.count
        assert not verdict.compared.differing
        del verdict
        found[what] = memory.peaks[what] - own
    found["engine"] = own - memory.joined
    print(json.dumps(found))
    bus.close()


def open_kind(
    kind: str, config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor], options: EngineOptions
) -> Engine:
    """vLLM with two workers, or the embedded engine with layers of this dtype."""
    first = Version(0, 1)
    if kind == VLLM:
        workers = 2 - config.num_attention_heads % 2  # the quick model has an odd number
        vllm = VllmSettings(tensor_parallel=workers, dtype="bfloat16")
        return open_engine("vllm", config, tensors, first, options, vllm=vllm)
    return open_engine("torch", config, tensors, first, replace(options, dtype=kind))


def with_workers() -> int:
    """Anonymous and shared memory of this process and those that it started."""
    total = private_bytes()
    for child in psutil.Process().children(recursive=True):
        with suppress(OSError):  # it ended
            total += private_bytes(child.pid)
    return total


def fetched_version(follower: WeightsFollower, version: Version) -> FetchedWeights:
    """The version, as soon as it is fetched and prepared for the engine."""
    follower.fetch_version(version)
    while (fetched := follower.take()) is None:
        assert follower.unavailable != version, "the store has it"
        time.sleep(SAMPLE_S)
    return fetched


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        apply(Path(sys.argv[2]), sys.argv[3])
