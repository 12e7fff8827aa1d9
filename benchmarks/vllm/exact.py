"""Greedy tokens and log-probabilities over an in-flight update: vLLM against transformers with the
old KV cache and the new weights on the same tokens, float32.
"""

import numpy as np
import torch

from benchmarks.case import Case, alone
from benchmarks.vllm.models import CONTEXT, PROMPT_TOKENS, V1, V2, prompt_of, small_model
from rollstream.producers.engines.base import GenerationRequest, WeightUpdate
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.vllm.engine import VllmEngine
from rollstream.streams.records import PROMPT
from rollstream.streams.values import Sampling
from testbed.update_reference import over_old_cache

ERROR_MAX = 1e-4


def logprob_error(tokens: int, slots: int) -> Case:
    old, new = small_model(0), small_model(1)
    engine = VllmEngine(old.config, old.state_dict(), V1, EngineOptions(slots, CONTEXT))
    sources = np.full(PROMPT_TOKENS, PROMPT, np.uint8)
    sampling, nothing = Sampling(temperature=0, tokens_max=tokens), np.zeros(0, np.float32)
    engine.submit(GenerationRequest("t", 0, prompt_of(0), sources, sampling, 0, nothing))
    found: list[int] = []
    logprobs: list[float] = []
    before = 0
    while engine.running():
        for emission in engine.poll(0.01):
            found += emission.tokens.tolist()
            logprobs += emission.logprobs.tolist()
            before += len(emission.tokens) * (emission.version == V1)
        if engine.version == V1 and engine.stats().tokens >= tokens // 3:
            engine.update(WeightUpdate(V2, new.state_dict()), "in_flight")
    greedy, wanted = over_old_cache(old, new, prompt_of(0), found, before)
    same = sum(a == b for a, b in zip(found, greedy, strict=True))
    error = float((torch.tensor(logprobs) - wanted).abs().max())
    note = f"{same} of {tokens} greedy tokens the same, {before} of them before the update"
    return alone("vllm_logprob_error", error, "nats", at_most=ERROR_MAX, note=note)
