"""Tokens per second of the `torch` engine against transformers' static-batch `generate`, one
thread.

Both sample at temperature 1 without stop tokens, so a request generates exactly `tokens_max`
tokens; only requested tokens count. Seconds are processor time, which other load on the machine
disturbs less than wall-clock time. Pairs are measured side by side.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.case import Case, paired
from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.streams.values import Sampling, Version

TRACE = Path(__file__).parent / "traces" / "longtail-512.json"
BATCH, CONTEXT, PROMPT, VOCABULARY, SAMPLES = 32, 512, 7, 18, 8
EQUAL_TOKENS = 128


def cases(quick: bool) -> Iterator[Case]:
    """Yields equal lengths, an architecture without its own decode path, and the committed
    trace.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pairs = 3 if quick else 7
        yield _equal("engine_equal", _quickstart_model(), pairs, 1.65)
        yield _equal("engine_generic", _generic_model(), pairs, 1.0)
        yield from _longtail(_quickstart_model(), quick)
    finally:
        torch.set_num_threads(threads)


def _equal(case: str, model: PreTrainedModel, pairs: int, goal: float) -> Case:
    lengths = [EQUAL_TOKENS] * BATCH
    engine, reference = _engine(model, lengths, BATCH), _static_batches(model, lengths)
    values, references = _side_by_side([engine], reference, lengths, pairs)
    return paired(
        case,
        values[0],
        "tokens/s",
        "generate, static batch of 32",
        references,
        goal,
        f"{type(model).__name__}, {BATCH} × {EQUAL_TOKENS} tokens",
    )


def _longtail(model: PreTrainedModel, quick: bool) -> Iterator[Case]:
    lengths: list[int] = json.loads(TRACE.read_text())["lengths"]
    lengths = lengths[:128] if quick else lengths
    slots = (32, 64, 96)
    engines = [_engine(model, lengths, each) for each in slots]
    reference = _static_batches(model, lengths)
    values, references = _side_by_side(engines, reference, lengths, 1 if quick else 5)
    for each, own in zip(slots, values, strict=True):
        yield paired(
            "engine_longtail" if each == BATCH else f"engine_longtail_{each}",
            own,
            "tokens/s",
            "generate, static batches of 32 in trace order",
            references,
            6.0 if each == BATCH else None,
            f"{len(lengths)} requests, {each} slots",
        )


def _side_by_side(
    engines: list[Callable[[], None]],
    reference: Callable[[], None],
    lengths: list[int],
    pairs: int,
) -> tuple[list[list[float]], list[float]]:
    """Returns tokens/s of every engine and of the reference, measured in turns after one unmeasured
    run.
    """
    values: list[list[float]] = [[] for _ in engines]
    references: list[float] = []
    for engine in engines:
        engine()
    for _ in range(pairs):
        references.append(sum(lengths) / _processor_s(reference))
        for own, engine in zip(values, engines, strict=True):
            own.append(sum(lengths) / _processor_s(engine))
    return values, references


def _processor_s(run: Callable[[], None]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def _engine(model: PreTrainedModel, lengths: list[int], slots: int) -> Callable[[], None]:
    engine = TorchEngine(
        model.config, model.state_dict(), Version(0, 1), EngineOptions(slots, CONTEXT)
    )
    prompts = _prompts(len(lengths))
    nothing, sources = np.zeros(0, np.float32), np.zeros(PROMPT, np.uint8)
    requests = [
        GenerationRequest(
            f"t{i}", i // SAMPLES, tokens, sources, Sampling(tokens_max=length), 0, nothing
        )
        for i, (tokens, length) in enumerate(zip(prompts, lengths, strict=True))
    ]

    def run() -> None:
        for request in requests:
            engine.submit(request)
        found = 0
        while emissions := engine.poll(60.0):
            found += sum(len(emission.tokens) for emission in emissions)
        assert found == sum(lengths)

    return run


def _static_batches(model: PreTrainedModel, lengths: list[int]) -> Callable[[], None]:
    """Static batching as in transformers: a batch runs until its longest request is done."""
    prompts = torch.from_numpy(np.stack(_prompts(len(lengths))).astype(np.int64))  # pyright: ignore[reportUnknownMemberType]

    def run() -> None:
        for begin in range(0, len(lengths), BATCH):
            ids = prompts[begin : begin + BATCH]
            longest = max(lengths[begin : begin + BATCH])
            made = model.generate(  # pyright: ignore[reportCallIssue, reportUnknownVariableType]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=longest,
                pad_token_id=0,
            )
            assert made.shape[1] == PROMPT + longest  # pyright: ignore[reportUnknownMemberType]

    return run


def _prompts(count: int) -> list[np.ndarray]:
    """Returns one prompt per group; the samples of a group are beside each other, as dispatch
    assigns them.
    """
    return [
        np.random.default_rng(index // SAMPLES).integers(1, VOCABULARY, PROMPT).astype(np.uint32)
        for index in range(count)
    ]


def _quickstart_model() -> PreTrainedModel:
    return _random(
        Qwen3ForCausalLM,
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_hidden_layers=3,
            intermediate_size=384,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=True,
            max_position_embeddings=CONTEXT,
        ),
    )


def _generic_model() -> PreTrainedModel:
    """A GPT-2 of similar size, which has no decode path of its own."""
    size = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=128,
        n_layer=3,
        n_head=4,
        n_positions=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _random(GPT2LMHeadModel, size)


def _random(kind: Callable[..., PreTrainedModel], config: object) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        model = kind(config).eval()
    model.requires_grad_(False)
    model.generation_config.eos_token_id = None  # both sides generate fixed lengths
    return model
