"""Random schedules of adapters in one torch engine, in which every cached value shows the version
that computed it.

The model has one layer, and the adapter of version n adds the same product to its values, s(n)
times. The first layer's values depend on their own token alone, so the value of a token under
version n is v₀ + s(n) · v₁ of a table by token: every value that a row reads from its cache is
compared with it. s repeats after `STRENGTHS` versions, far more than an engine serves at once, so
that rounding stays far below the difference of two versions however many there were.
"""

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rollstream.producers.engines.base import GenerationRequest, WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.producers.engines.torch.rows import TorchSequence
from rollstream.storage.model_folder.lora import HIGH, LOW, PREFIX
from rollstream.streams.records import PROMPT
from rollstream.streams.values import Sampling, Version

BASE = Version(0, 0)
VOCABULARY, HIDDEN, CONTEXT, SLOTS = 7, 8, 24, 3
LAYER = f"{PREFIX}model.layers.0.self_attn.v_proj"
STRENGTHS = 101
TOLERANCE = 1e-4  # of 1 + s


@dataclass(slots=True)
class ScheduleCounts:
    """Checked rows; `stale` rows read values of another version, `unloaded` counts
    steps of a sequence whose adapter was gone.
    """

    rows: int = 0
    stale: int = 0
    unloaded: int = 0


def strength(number: int) -> int:
    """s: how many times the adapter of this version adds the product."""
    return 1 + number % STRENGTHS


def tolerance(times: int) -> float:
    """Most difference of a value of this strength from its table."""
    return TOLERANCE * (1 + times)


class AdapterSchedules:
    """One engine for many schedules, each of which ends with an empty engine."""

    def __init__(self) -> None:
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=64,
        )  # fmt: skip
        self.tensors = LlamaForCausalLM(config).state_dict()
        self.low, self.high = torch.randn(2, HIDDEN), torch.randn(HIDDEN, 2)
        options = EngineOptions(SLOTS, CONTEXT, emit_every=4)
        self.engine = TorchEngine(config, self.tensors, BASE, options)
        self.newest = 0
        embedded = self.tensors["model.embed_tokens.weight"]
        normed = torch.nn.functional.rms_norm(embedded, (HIDDEN,), eps=config.rms_norm_eps)
        self.own = normed @ self.tensors["model.layers.0.self_attn.v_proj.weight"].t()
        self.added = normed @ self.low.t() @ self.high.t()
        self.counts = ScheduleCounts()

    def run(self, drawn: random.Random, actions: int = 24) -> None:
        """Run one schedule, and then everything in the engine to its end."""
        self._load(self.newest + 1)
        for number in range(actions):
            draw = drawn.random()
            if draw < 0.2:
                self._load(self.newest + 1)
            elif draw < 0.28:
                self._load(max(1, self.newest - drawn.randrange(4)))
            elif draw < 0.6:
                self._submit(drawn, f"{drawn.random()}-{number}")
            elif draw < 0.65 and self.engine.running():
                self.engine.abort(drawn.choice(self.engine.running()))
            else:
                self._step()
        while self.engine.running():
            self._step()

    def _load(self, number: int) -> None:
        self.newest = max(self.newest, number)
        tensors: dict[str, Tensor] = {
            LAYER + LOW: self.low,
            LAYER + HIGH: self.high * strength(number),
        }
        self.engine.update(WeightUpdate(Version(number, 1), tensors, scaling=1.0), "keep_version")

    def _submit(self, drawn: random.Random, name: str) -> None:
        prompt = np.arange(3 + drawn.randrange(3), dtype=np.uint32)  # few kinds, so that many hit
        version = drawn.choice(self.engine.versions)
        sampling = Sampling(tokens_max=1 + drawn.randrange(10))
        sources = np.full(len(prompt), PROMPT, np.uint8)
        nothing = np.zeros(0, np.float32)
        request = GenerationRequest(name, 0, prompt, sources, sampling, 1, nothing, version=version)
        self.engine.submit(request)

    def _step(self) -> None:
        engine = self.engine
        try:
            for emission in engine.poll(0.0):
                self.counts.stale += emission.version not in engine.versions and not emission.finish
        except KeyError:
            self.counts.unloaded += 1
            raise
        held = engine.versions
        for name in engine.running():
            self.counts.unloaded += engine._known[name].request.version not in held  # pyright: ignore[reportPrivateUsage]
        for sequence in engine._batch.rows:  # pyright: ignore[reportPrivateUsage]
            self._check(sequence)

    def _check(self, sequence: TorchSequence) -> None:
        """Compare the cached values of the prompt's tokens with those of its version."""
        batch, version = self.engine._batch, sequence.request.version  # pyright: ignore[reportPrivateUsage]
        assert version is not None
        start = int(batch._starts[sequence.row])  # pyright: ignore[reportPrivateUsage]
        tokens = sequence.request.tokens[:-1].astype(np.int64)
        found = batch.cache.values[0][sequence.row, 0, start : start + len(tokens)]
        times = strength(version.number)
        wanted = self.own[tokens] + times * self.added[tokens]
        self.counts.rows += 1
        self.counts.stale += bool((found - wanted).abs().max() > tolerance(times))
