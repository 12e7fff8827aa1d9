"""The delta codec: bytes against their entropy floor, speed on one core, and real training runs.

The synthetic tensor has 16.8 M bfloat16 weights cast from float32 masters, N(0, 0.02²), before and
after a step of normal size: Adam's on random gradients (β1 0.9) at a learning rate 4.4 × as large.
The floor treats positions as independent, n·h(p) bits, and adds the empirical entropy of the
changed elements' differences in representable numbers.

Speeds are GB of full bfloat16 weights per second of processor time: encoding with the comparison of
both tensors, applying with the hash of the result. Between two of them a copy of the weights is
measured, which also empties the caches.

Measured and left out: both sides know the parent's weights, and small ones change far more often
(at 1.3 %, half of those near 3e-4 and one of 200 near 0.02). Flags for the small ones and positions
for the others took 21 % off, past the floor, and three quarters of both speeds: more time than a
network of 10 Mbit/s gains.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.case import Case, alone
from benchmarks.runs.measured import run
from benchmarks.runs.quickstart import ASYNC, QUICKSTART
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.delta.codec import apply_tensor, encode_tensor
from rollstream.storage.weights.delta.coding import CodedTensor
from rollstream.storage.weights.fetch import fetch_tensors
from rollstream.storage.weights.manifest import parse_version
from rollstream.storage.weights.tensors import DTYPE_NAMES, tensor_bytes, tensor_hash

Words = npt.NDArray[np.uint16]
Tensors = Mapping[str, torch.Tensor]

WEIGHTS = 1 << 24
SPARSE, DENSE = 3.0e-7, 5.0e-6  # sizes of a step: 1.2 % and 12 % of the weights change
REPEATS, REPEATS_QUICK = 15, 5
QUICKSTART_STEPS, QUICKSTART_STEPS_QUICK = 12, 4
LONG_STEPS, LONG_STEPS_QUICK = 40, 8


def cases(quick: bool) -> Iterator[Case]:
    """Yields size at two densities, speed of both directions, and two runs of real training."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        base, new = _step(SPARSE)
        yield _size("delta_sparse", base, new, 0.95)
        yield _size("delta_dense", *_step(DENSE), 0.93)
        yield from _speed(base, new, REPEATS_QUICK if quick else REPEATS)
        yield _long_run(LONG_STEPS_QUICK if quick else LONG_STEPS)
        yield _quickstart(QUICKSTART_STEPS_QUICK if quick else QUICKSTART_STEPS)
    finally:
        torch.set_num_threads(threads)


def _step(size: float) -> tuple[Words, Words]:
    draw = torch.Generator().manual_seed(0)
    masters = torch.randn(WEIGHTS, generator=draw) * 0.02
    moved = masters - size * torch.randn(WEIGHTS, generator=draw)
    return _words(masters.bfloat16()), _words(moved.bfloat16())


def _words(tensor: torch.Tensor) -> Words:
    return tensor.view(torch.uint16).numpy()


def _size(case: str, base: Words, new: Words, least: float) -> Case:
    coded = encode_tensor(base.data, new.data, "BF16")
    size = len(coded.payload)
    note = (
        f"{coded.changed / len(new):.2%} changed, {coded.values} values, {size:,} bytes: "
        f"{new.nbytes / size:.1f} × smaller than full"
    )
    return alone(case, floor_bytes(base, new) / size, "floor/bytes", at_least=least, note=note)


def floor_bytes(base: Words, new: Words) -> float:
    """The lowest cost of independent positions and independent differences."""
    differs = base != new
    steps = _ordered(new[differs]) - _ordered(base[differs])
    return _entropy_bits(differs) / 8 + _entropy_bits(steps) / 8


def _ordered(words: Words) -> npt.NDArray[np.int64]:
    """bfloat16 bits as integers in numeric order, −0 just below +0."""
    magnitude = (words & 0x7FFF).astype(np.int64)
    return np.where(words >> 15, -1 - magnitude, magnitude)


def _entropy_bits(symbols: npt.NDArray[np.generic]) -> float:
    counts = np.unique(symbols, return_counts=True)[1]
    return float((counts * np.log2(len(symbols) / counts)).sum())


def _speed(base: Words, new: Words, repeats: int) -> Iterator[Case]:
    coded = encode_tensor(base.data, new.data, "BF16")
    digest = tensor_hash("BF16", new.shape, new.data)
    held, copy = base.copy(), np.empty_like(base)
    encode_s: list[float] = []
    apply_s: list[float] = []
    copy_s: list[float] = []

    def apply() -> None:
        apply_tensor(coded.coding, coded.values, coded.payload, held.view(np.uint8).data, "BF16")
        assert tensor_hash("BF16", held.shape, held.data) == digest

    for _ in range(repeats):
        copy_s.append(_processor_s(lambda: np.copyto(copy, new)))
        encode_s.append(_processor_s(lambda: encode_tensor(base.data, new.data, "BF16")))
        np.copyto(held, base)
        copy_s.append(_processor_s(lambda: np.copyto(copy, new)))
        apply_s.append(_processor_s(apply))
    copying = new.nbytes / statistics.median(copy_s) / 1e9
    changed = f"{coded.changed / len(new):.2%} changed"
    for case, seconds in (("delta_encode", encode_s), ("delta_apply", apply_s)):
        speed = new.nbytes / statistics.median(seconds) / 1e9
        note = f"{changed}; {speed / copying:.2f} of a memory copy, {copying:.1f} GB/s"
        yield alone(case, speed, "GB/s", at_least=1.0, note=note)


def _processor_s(work: Callable[[], object]) -> float:
    gc.collect()
    began = time.process_time()
    work()
    return time.process_time() - began


def _long_run(steps: int) -> Case:
    """30 M weights, float32 masters published as bfloat16; the second half of the steps counts."""
    model = _model()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
    draw = torch.Generator().manual_seed(1)
    total = _Total()
    last: Tensors = {}
    for step in range(steps):
        tokens = torch.randint(0, model.config.vocab_size, (2, 128), generator=draw)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimiser.step()  # pyright: ignore[reportUnknownMemberType]
        optimiser.zero_grad()
        if step >= steps // 2 - 1:
            now = {name: each.detach().bfloat16() for name, each in model.named_parameters()}
            if last:
                total.add(last, now)
            last = now
    return total.case("delta_real", f"30 M weights, lr 1e-6, bfloat16, steps to {steps}")


def _model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        return Qwen3ForCausalLM(config)


def _quickstart(steps: int) -> Case:
    """Every two consecutive versions of a short run of the product, as published."""
    total = _Total()
    with tempfile.TemporaryDirectory(prefix="rollstream-delta-") as scratch:
        folder = Path(scratch) / "run"
        run(QUICKSTART, folder, [*ASYNC, f"trainer.steps={steps}"])
        store = open_store(f"file:{folder / 'store'}")
        folders = {entry.key.split("/")[1] for entry in store.list("weights/v")}
        versions = sorted(each for name in folders if (each := parse_version(name)))
        last: Tensors = {}
        for version in versions:
            now = fetch_tensors(store, version)[1]
            if last:
                total.add(last, now)
            last = now
    return total.case("delta_real_quickstart", f"quickstart, float32, {len(versions)} versions")


class _Total:
    """Bytes of the deltas between consecutive versions, against those of full ones."""

    def __init__(self) -> None:
        self.full = self.delta = self.changed = self.elements = 0

    def add(self, base: Tensors, new: Tensors) -> None:
        for name, tensor in new.items():
            coded = self._coded(base[name], tensor)
            self.full += tensor.nbytes
            self.delta += len(coded.payload)
            self.changed += coded.changed
            self.elements += tensor.numel()

    def case(self, case: str, note: str) -> Case:
        share = f"{self.changed / self.elements:.2%} changed"
        return alone(case, self.full / self.delta, "full/delta", note=f"{note}; {share}")

    @staticmethod
    def _coded(base: torch.Tensor, new: torch.Tensor) -> CodedTensor:
        dtype = DTYPE_NAMES[new.dtype]
        return encode_tensor(tensor_bytes(base), tensor_bytes(new), dtype)
