"""`vllm_kv_handover`: a trajectory leaves one vLLM engine and goes on in another of the same node,
with its KV and without. What is timed begins with the abort and ends with the next token; what the
log and dispatch take in between (docs/scheduling.md) is the same for both and left out.

Each engine's core is a process of its own. Both arms of a pair go on in the same engine, after as
many tokens, each after others: nothing is found in a prefix cache.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.case import Case, paired
from benchmarks.vllm_models import V1, VOCABULARY, small_model
from producers.engines.base import Request
from producers.engines.drafts.segment import MEMORY
from producers.engines.vllm_engine import VllmEngine
from producers.settings import VllmSettings
from streams.records import GENERATED, PROMPT, Floats, Sampling, Span, Tokens

LENGTHS = 256, 1500
"""Tokens of the context that moves."""
LONGEST, GAINED, MORE = 2048, 8, 400
NAME = "moved"


def kv_handover(pairs: int) -> Iterator[Case]:
    """One case for each length of context."""
    model = small_model(0)
    model.config.max_position_embeddings = LONGEST  # rotary: no weight depends on it
    settings, tensors = VllmSettings(kv_handover=True), model.state_dict()
    plain, source, target = (
        VllmEngine(model.config, tensors, V1, 2, LONGEST, 1, settings=settings) for _ in range(3)
    )
    memory = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        for engine in (source, target):
            engine.hand_over("benchmark", Path(folder) / "kv", "in_flight")
        for length in LENGTHS:
            yield _compared(plain, source, target, length, pairs)


def _compared(
    plain: VllmEngine, source: VllmEngine, target: VllmEngine, length: int, pairs: int
) -> Case:
    anew: list[float] = []
    along: list[float] = []
    draw = np.random.default_rng(length)
    for pair in range(-1, pairs):  # one to warm up
        order = ((plain, anew), (source, along))
        for engine, times in order if pair % 2 else reversed(order):
            before = target.handed_over()["taken_in"]
            times.append(1e3 * _moved(engine, target, length, draw))
            assert target.handed_over()["taken_in"] - before == (times is along), "as it was meant"
    note = f"{length} tokens, from the abort to the next token"
    case = f"vllm_kv_handover_{length}"
    return paired(case, along[1:], "ms", "prefilled again", anew[1:], note=note)


def _moved(source: VllmEngine, target: VllmEngine, length: int, draw: np.random.Generator) -> float:
    """Seconds from the abort to the next token."""
    request = _request(length - GAINED, draw)
    source.submit(request)
    tokens, logprobs = [request.tokens], [request.logprobs]
    while sum(map(len, logprobs)) < GAINED:
        for emission in source.poll(10.0):
            tokens.append(emission.tokens)
            logprobs.append(emission.logprobs)
    began = time.perf_counter()
    source.abort(NAME)
    target.submit(_onward(request, tokens, logprobs))
    while not target.poll(10.0):
        pass
    return time.perf_counter() - began


def _request(length: int, draw: np.random.Generator) -> Request:
    """What the source would go on with for long: its core decodes on until the abort."""
    tokens = draw.integers(0, VOCABULARY, length).astype(np.uint32)
    sources = np.full(length, PROMPT, np.uint8)
    sampling = Sampling(temperature=0, tokens_max=MORE)
    return Request(NAME, 0, tokens, sources, sampling, 0, np.zeros(0, np.float32))


def _onward(request: Request, tokens: list[Tokens], logprobs: list[Floats]) -> Request:
    """It ends with its next token."""
    generated = np.full(GAINED, GENERATED, np.uint8)
    return replace(
        request,
        sampling=replace(request.sampling, tokens_max=GAINED + 1),
        tokens=np.concatenate(tokens),
        sources=np.concatenate((request.sources, generated)),
        logprobs=np.concatenate(logprobs),
        spans=(Span(0, GAINED, V1),),
    )
