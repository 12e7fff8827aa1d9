"""The cost of publishing to a training step, and of an update to decoding.

The stall beyond the snapshot, which is faster than the copy that it is compared with, is a step
that takes 5 % longer while the publisher's thread compares and encodes on the other core: memory
and the interpreter's lock are shared. A lower priority of that thread and a shorter switch interval
were tried and change nothing. A process of its own is not built: in five pairs on a loaded machine
the median cost to a step of 562 ms, in processor time, was 17 ms for the thread with its snapshot,
11 ms for another process that compares, encodes and hashes without pause, and 37 ms for one that
only copies memory; single pairs differ by more than that. Another process would share memory
too.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.case import Case
from benchmarks.weights.sides import Sides, nudged
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.consumers.trainer.ledger import Ledger
from rollstream.consumers.trainer.publisher import CheckpointRetention, StepPublisher, StepSnapshot
from rollstream.producers.engines.base import GenerationRequest, WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.stores.file import FileStore
from rollstream.storage.weights.tensors import untie
from rollstream.streams.records import GENERATED, PROMPT, Position, StepDone
from rollstream.streams.values import Sampling, Span, Version

VOCABULARY, PROMPT_TOKENS, TOKENS = 8192, 8, 40
STEPS = 3  # steps between two waits for publishing
ROWS, CONTEXT = 8, 512
CHANGED = 0.01
SETTINGS = TrainerSettings(workers=1, threads=1, lr=1e-6, lr_ramp_steps=0, steps=1000)


def model_of(layers: int) -> PreTrainedModel:
    """A decoder with about 3.4 M parameters a layer."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=640,
        num_hidden_layers=layers,
        intermediate_size=1280,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=80,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config).eval()


def measure_stall(quick: bool) -> Case:
    """Difference of paired step times with publishing on and off, against a copy of the masters.
    Steps have few tokens, so that the weights' share of a step is as large as possible.
    """
    learner = TorchLearner(model_of(4 if quick else 16), SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        stepper = _Stepper(learner, Path(folder))
        stepper.steps(STEPS, publish=True)  # touches all memory pages
        on: list[float] = []
        off: list[float] = []
        copies: list[float] = []
        for _ in range(3 if quick else 7):
            off.append(stepper.steps(STEPS, publish=False))
            on.append(stepper.steps(STEPS, publish=True))
            copies.append(stepper.copy())
        stepper.close()
    differences = sorted(a - b for a, b in zip(on, off, strict=True))
    value, copy = statistics.median(differences), statistics.median(copies)
    ratio = value / copy
    note = (
        f"{learner.flat.numel() / 1e6:.0f} M parameters, fp32 to bf16; a step without publishing "
        f"takes {statistics.median(off):.3f} s; difference {differences[0]:.3f} to "
        f"{differences[-1]:.3f} s in {len(on)} pairs, {stepper.processor_s():.4f} s of processor "
        f"time in the learner's threads; the snapshot alone {stepper.snapshot_s():.4f} s; "
        "at most the goal"
    )
    reference = "a copy of the fp32 masters into used memory"
    return Case("publish_stall", value, "s", reference, copy, ratio, 1.2, ratio <= 1.2, note)


def measure_hashes(quick: bool) -> Case:
    """Paired step times with and without hashes, where the state is above the bound under which a
    step hashes it: the last of `STEPS` steps has a checkpoint, whose copy the publisher hashes.
    """
    learner = TorchLearner(model_of(4 if quick else 16), SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        stepper = _Stepper(learner, Path(folder))
        stepper.hashed_steps(STEPS, hashed=True)  # touches all memory pages
        hashed: list[float] = []
        none: list[float] = []
        for _ in range(3 if quick else 9):
            none.append(stepper.hashed_steps(STEPS, hashed=False))
            hashed.append(stepper.hashed_steps(STEPS, hashed=True))
        stepper.close()
    ratios = sorted(a / b for a, b in zip(hashed, none, strict=True))
    value, base, ratio = map(statistics.median, (hashed, none, ratios))
    note = (
        f"{learner.flat.numel() / 1e6:.0f} M parameters, a checkpoint every {STEPS} steps; ratio "
        f"{ratios[0]:.3f} to {ratios[-1]:.3f} in {len(ratios)} pairs; at most the goal"
    )
    reference = "the same steps and checkpoints without a hash of the state"
    return Case("hash_stall", value, "s", reference, base, ratio, 1.02, ratio <= 1.02, note)


class _Stepper:
    """The trainer's step as its loop does it, with and without publishing."""

    def __init__(self, learner: TorchLearner, folder: Path) -> None:
        self._learner = learner
        self._sides = Sides(FileStore(folder / "store"), folder / "bus", deltas=True)
        ledger = Ledger(self._sides.bus, 1)
        ledger.open(Position())
        metrics = MetricsFile(folder / "trainer.jsonl")
        store = self._sides.store
        self._publisher = StepPublisher(
            store, self._sides.versions, ledger, metrics, CheckpointRetention(1)
        )
        self._step = -1
        self._snapshots: list[float] = []
        self._busy: dict[bool, list[float]] = {True: [], False: []}
        self._into = learner.flat.clone()
        self._sample = _sample()

    def steps(self, count: int, publish: bool) -> float:
        """Seconds of one of `count` steps; publishing in progress is waited for afterwards."""
        began, busy = time.perf_counter(), time.thread_time() + self._learner.busy_s
        for _ in range(count):
            self._learner.submit([self._sample])
            self._learner.finish_update()
            state_hash = self._learner.state_hash()
            if publish:
                self._publish(state_hash)
        seconds = time.perf_counter() - began
        self._busy[publish].append((time.thread_time() + self._learner.busy_s - busy) / count)
        self._await_published()
        return seconds / count

    def _await_published(self) -> None:
        publisher = self._publisher
        while (
            publisher.waiting()
            or publisher.weight_buffers.in_use > 1
            or (publisher.state_buffers.in_use)
        ):
            publisher.check()
            time.sleep(0.01)

    def hashed_steps(self, count: int, hashed: bool) -> float:
        """Seconds of one of `count` published steps, of which the last has a checkpoint. A given
        hash keeps the publisher from hashing.
        """
        began = time.perf_counter()
        for step in range(count):
            self._learner.submit([self._sample])
            self._learner.finish_update()
            self._publish("" if hashed else "none", is_last=step == count - 1)
        self._learner.submit([self._sample])  # beside the checkpoint and its hash
        self._learner.finish_update()
        seconds = time.perf_counter() - began
        self._await_published()
        return seconds / (count + 1)

    def _publish(self, state_hash: str, is_last: bool = False) -> None:
        self._step += 1
        done = StepDone(self._step, Version(self._step, 1), state_hash, 1, {}, {}, 0.0)
        self._publisher.await_room()
        kept = None
        if is_last:
            kept = (self._learner.state(self._publisher.state_buffers), {})
        began = time.perf_counter()
        tensors = self._learner.snapshot("bfloat16", self._publisher.weight_buffers)
        self._snapshots.append(time.perf_counter() - began)
        self._publisher.submit(StepSnapshot(done, tensors, kept, None, {}, {}))

    def copy(self) -> float:
        """Seconds of a plain copy of the masters."""
        began = time.perf_counter()
        self._into.copy_(self._learner.flat)
        return time.perf_counter() - began

    def processor_s(self) -> float:
        """Median difference that publishing makes to the processor time of a step in the trainer's
        own threads, which other load on the machine disturbs less.
        """
        on, off = self._busy[True][1:], self._busy[False]
        return statistics.median(a - b for a, b in zip(on, off, strict=True))

    def snapshot_s(self) -> float:
        return statistics.median(self._snapshots)

    def close(self) -> None:
        self._publisher.close()
        self._learner.close()
        self._sides.close()


def _sample() -> Sample:
    draw = np.random.default_rng(0)
    generated = TOKENS - PROMPT_TOKENS
    return Sample(
        trajectory="t",
        group=0,
        tokens=draw.integers(0, VOCABULARY, TOKENS).astype(np.uint32),
        sources=np.repeat(np.array([PROMPT, GENERATED], np.uint8), [PROMPT_TOKENS, generated]),
        logprobs=np.full(generated, -9.0, np.float32),
        spans=(Span(0, generated, Version(0, 1)),),
        reward=1.0,
        advantage=1.0,
        temperature=1.0,
        mask=np.ones(generated, np.bool_),
    )


def measure_gap(quick: bool) -> Case:
    """Largest time between two tokens of a running row while deltas are fetched, prepared, applied
    and read back, against two decode steps and the copy alone.
    """
    model = model_of(4 if quick else 12)
    kept, tied = untie(model.state_dict())
    tensors = {name: tensor.bfloat16() for name, tensor in kept.items()}
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(FileStore(Path(folder) / "store"), Path(folder) / "bus", deltas=True)
        sides.publish(_tied(tensors, tied))
        first = sides.fetched(None).update
        engine = TorchEngine(
            model.config, first.tensors, first.version, EngineOptions(ROWS, CONTEXT)
        )
        sides.follower.prepare = engine.prepare
        ratios: list[float] = []
        gaps: list[float] = []
        allowed: list[float] = []
        for number in range(2 if quick else 5):
            tensors = nudged(tensors, CHANGED, number)
            sides.publish(_tied(tensors, tied))
            gap, step, copy = _gap(engine, sides)
            gaps.append(gap)
            allowed.append(2 * step + copy)
            ratios.append(gap / allowed[-1])
        sides.close()
    value, base = statistics.median(gaps), statistics.median(allowed)
    ratio = statistics.median(ratios)
    size = sum(tensor.numel() for tensor in kept.values()) / 1e6
    note = (
        f"{size:.0f} M parameters served as fp32, {ROWS} rows, ratio {min(ratios):.2f} to "
        f"{max(ratios):.2f} in {len(ratios)} updates; the trainer is not running; at most the goal"
    )
    reference = "two decode steps + the copy, measured without a follower at work"
    return Case("inflight_gap", value, "s", reference, base, ratio, 1.0, ratio <= 1.0, note)


def _gap(engine: TorchEngine, sides: Sides) -> tuple[float, float, float]:
    """Largest gap during an update, then a decode step and the copy, each alone."""
    _fill(engine)
    for _ in range(10):
        engine.poll(0.0)
    updates: list[WeightUpdate] = []

    def look() -> None:
        sides.follower.read()
        sides.follower.prefetch(engine.version)
        fetched = sides.follower.take()
        if fetched is not None:
            began = time.perf_counter()
            engine.update(fetched.update, "in_flight")
            seconds = time.perf_counter() - began
            sides.follower.compare(fetched, engine.read_back, seconds)
            updates.append(fetched.update)

    largest = 0.0
    before = time.perf_counter()
    while not updates or sides.follower.verdict() is None:
        if not updates:
            look()
        engine.poll(0.0)
        now = time.perf_counter()
        largest, before = max(largest, now - before), now
    steps = [_timed(lambda: engine.poll(0.0)) for _ in range(20)]
    again = WeightUpdate(engine.version, updates[0].tensors, engine.version, updates[0].patches)
    prepared = engine.prepare(again)
    copy = min(_timed(lambda: engine.update(prepared, "in_flight")) for _ in range(3))
    for name in engine.running():
        engine.abort(name)
    return largest, statistics.median(steps), copy


def _fill(engine: TorchEngine) -> None:
    draw = np.random.default_rng(0)
    for row in range(ROWS):
        tokens = draw.integers(0, VOCABULARY, PROMPT_TOKENS).astype(np.uint32)
        sources = np.zeros(PROMPT_TOKENS, np.uint8)
        sampling = Sampling(tokens_max=CONTEXT - PROMPT_TOKENS)
        nothing = np.zeros(0, np.float32)
        engine.submit(GenerationRequest(f"t{row}", row, tokens, sources, sampling, 0, nothing))


def _tied(tensors: dict[str, torch.Tensor], tied: dict[str, str]) -> dict[str, torch.Tensor]:
    return tensors | {name: tensors[owner] for name, owner in tied.items()}


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
