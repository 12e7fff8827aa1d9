"""The cost of an in-flight update: how long decoding stops, ours against vLLM's own pause and
reload of the same weights, on the same core, with the same requests running; and whether a request
is lost or repeated over many updates under load.

vLLM's own way is the one that it has without a GPU: pause (`keep`), `reload_weights` from a
checkpoint in memory (`/dev/shm` where it exists), resume. Ours loads from the shared memory that
`prepare` wrote beside decoding. Both wait for the end of the current step. The core has one thread.
"""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.case import Case, alone
from benchmarks.vllm.models import CONTEXT, PROMPT_TOKENS, V1, large_model, prompt_of, small_model
from rollstream.producers.engines.base import GenerationRequest, WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.vllm.engine import VllmEngine
from rollstream.storage.weights.resident import TensorPatch
from rollstream.storage.weights.tensors import untie
from rollstream.streams.records import PROMPT
from rollstream.streams.values import Sampling, Version

RATIO_MAX = 1.3
RUNNING = 4
CHANGED = 0.01  # of the elements of each tensor, in a delta

Tensors = Mapping[str, torch.Tensor]


def update_pause(pairs: int) -> list[Case]:
    """Full and delta, each in `pairs` pairs of which every second one starts with vLLM's."""
    model = large_model(0)
    old = dict(model.state_dict())
    new, patches = _changed(old)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="rollstream-vllm-", dir=memory) as folder:
        other = large_model(0)
        other.load_state_dict(new)
        other.save_pretrained(folder)  # pyright: ignore[reportUnknownMemberType]
        del other
        engine = VllmEngine(model.config, old, V1, EngineOptions(RUNNING, CONTEXT))
        bench = _Pauses(engine, folder)
        for kind, update in (("full", None), ("delta", patches)):
            for pair in range(pairs + 1):  # the first one warms up
                bench.pair(kind, old, new, update, theirs_first=bool(pair % 2), kept=pair > 0)
    return [bench.case("vllm_update_pause", "full"), bench.case("vllm_update_pause", "delta")]


class _Pauses:
    """One engine with a constant supply of requests."""

    def __init__(self, engine: VllmEngine, folder: str) -> None:
        self._engine, self._folder = engine, folder
        self._number, self._asked = 1, 0
        self._seconds: dict[tuple[str, str], list[float]] = {}
        # Opened without a checkpoint, which reloading asks for.
        readable = {"load_config": {"load_format": "safetensors", "use_tqdm_on_load": False}}
        self._core: Any = engine._core  # pyright: ignore[reportPrivateUsage]  # vLLM's own engine is in it
        self._core._engine.collective_rpc("update_config", args=(readable,))

    def pair(
        self,
        kind: str,
        old: Tensors,
        new: Tensors,
        patches: tuple[TensorPatch, ...] | None,
        *,
        theirs_first: bool,
        kept: bool,
    ) -> None:
        for theirs in (True, False) if theirs_first else (False, True):
            self._take(old, None)  # from here both go to `new`
            self._decode()
            seconds = self._reload() if theirs else self._take(new, patches)
            if kept:
                self._seconds.setdefault((kind, "theirs" if theirs else "ours"), []).append(seconds)
            self._decode()

    def case(self, name: str, kind: str) -> Case:
        ours, theirs = self._seconds[kind, "ours"], self._seconds[kind, "theirs"]
        ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
        ratio = float(np.median(ratios))
        whole = "" if kind == "full" or torch.cuda.is_available() else " (loaded whole on a CPU)"
        note = (
            f"{kind}{whole}, 100 M parameters, {RUNNING} requests running; ratio "
            f"{ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} pairs"
        )
        mine, other = float(np.median(ours)), float(np.median(theirs))
        reference = "vLLM's pause, reload and resume"
        met = ratio <= RATIO_MAX
        return Case(name, mine, "s", reference, other, ratio, RATIO_MAX, met, note)

    def _take(self, tensors: Tensors, patches: tuple[TensorPatch, ...] | None) -> float:
        """Seconds from the pause until decoding continues; earlier work is done beside decoding."""
        self._number += 1
        base = None if patches is None else self._engine.version
        update = WeightUpdate(Version(self._number, 1), tensors, base, patches)
        prepared = self._engine.prepare(update)
        began = time.perf_counter()
        self._engine.update(prepared, "in_flight")
        return time.perf_counter() - began

    def _reload(self) -> float:
        """vLLM's own way; the label of the version stays, so the spans that it stamps do too."""
        core = self._core
        began = time.perf_counter()
        core._engine.engine_core.call_utility("pause_scheduler", "keep", False)
        core._engine.collective_rpc("reload_weights", kwargs={"weights_path": self._folder})
        core._engine.engine_core.call_utility("resume_scheduler")
        return time.perf_counter() - began

    def _decode(self) -> None:
        """Runs some steps with a full set of requests."""
        target = self._engine.stats().tokens + 4 * RUNNING
        while self._engine.stats().tokens < target:
            while len(self._engine.running()) < RUNNING:
                self._asked += 1
                self._engine.submit(_request(f"t{self._asked}", self._asked, 256))
            self._engine.poll(0.05)


def updates_lost(count: int, slots: int) -> Case:
    """Requests that are missing, cut short or answered twice after `count` updates under load."""
    states = [dict(small_model(seed).state_dict()) for seed in (0, 1)]
    engine = VllmEngine(small_model(0).config, states[0], V1, EngineOptions(slots, CONTEXT))
    tokens, finished, spans = dict[str, int](), list[str](), 0

    def read(wait_s: float) -> None:
        for emission in engine.poll(wait_s):
            name = emission.trajectory
            tokens[name] = tokens.get(name, 0) + len(emission.tokens)
            finished.extend([name] if emission.finish else [])

    began = time.perf_counter()
    for number in range(2, count + 2):
        for index in range(slots - len(engine.running())):
            engine.submit(_request(f"{number}.{index}", number * slots + index, 24))
        read(0.02)
        engine.update(
            engine.prepare(WeightUpdate(Version(number, 1), states[number % 2])), "in_flight"
        )
        spans += len(engine.running())
    while engine.running():
        read(10.0)
    short = sum(gained != 24 for gained in tokens.values())
    wrong = short + len(finished) - len(set(finished)) + len(set(tokens) - set(finished))
    note = (
        f"{count} updates, {len(finished)} requests of 24 tokens, {spans / count:.1f} running at "
        f"each, 7.4 M parameters, {time.perf_counter() - began:.0f} s"
    )
    return alone("vllm_updates_lost", wrong, "requests", at_most=0, note=note)


def _request(name: str, index: int, tokens: int) -> GenerationRequest:
    sources, nothing = np.full(PROMPT_TOKENS, PROMPT, np.uint8), np.zeros(0, np.float32)
    sampling = Sampling(tokens_max=tokens)
    return GenerationRequest(name, 0, prompt_of(index), sources, sampling, 7, nothing)


def _changed(old: Tensors) -> tuple[dict[str, torch.Tensor], tuple[TensorPatch, ...]]:
    """The tensors with `CHANGED` of the elements of each drawn again, and the patches to them."""
    kept, tied = untie(old)
    new: dict[str, torch.Tensor] = {}
    patches: list[TensorPatch] = []
    draw = torch.Generator().manual_seed(0)
    for name, tensor in kept.items():
        count = max(1, int(tensor.numel() * CHANGED))
        at = torch.randperm(tensor.numel(), generator=draw)[:count].sort().values
        new[name] = tensor.clone()
        new[name].view(-1)[at] += torch.randn(count, generator=draw).to(tensor.dtype) * 0.01
        values = new[name].view(-1)[at].clone()
        patches.append(TensorPatch(name, tuple(tensor.shape), tensor.dtype, at, values))
    return new | {name: new[owner] for name, owner in tied.items()}, tuple(patches)
