"""The engine `vllm` against transformers and against vLLM by itself; wants vLLM (`make vllm`).

* `vllm_logprob_error`: an in-flight update between two greedy tokens, then transformers with the
  old KV cache and the new weights on the same tokens, float32.
* `vllm_overhead`: a whole rollout worker (orders, partials, status, a SQLite log) against bare
  `AsyncLLM`, each with its core in a process of its own: the same prompts, lengths, number of
  requests at a time and log-probabilities asked for. Wall-clock, in pairs side by side.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.case import Case, alone, paired
from producers.engines.base import Request, Update
from producers.engines.vllm_engine import VllmEngine
from producers.rewards import RewardPool
from producers.rollout.judging import Judging
from producers.rollout.orders import Orders
from producers.rollout.outbox import Outbox
from producers.rollout.pulse import Pulse
from producers.rollout.voice import Voice
from producers.rollout.weights import WeightsFollower
from producers.rollout.worker import Rollout
from producers.settings import RolloutSettings, TaskSettings
from storage.connect import open_store
from streams.connect import open_bus
from streams.records import PROMPT, Assignment, Sampling, Version
from streams.topics import catalogue

V1, V2 = Version(1, 1), Version(2, 1)
BATCH, CONTEXT, PROMPT_TOKENS, VOCABULARY = 16, 512, 32, 4096
ERROR_MAX = 1e-4


def cases(quick: bool) -> Iterator[Case]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield _logprob_error(100 if quick else 400)
        yield _overhead(pairs=2 if quick else 5, lengths=[32 if quick else 128] * 3 * BATCH)
    finally:
        torch.set_num_threads(threads)


def _model(seed: int) -> PreTrainedModel:
    """Qwen3 of 7.4 M parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=8,
        intermediate_size=768,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).eval()
    return model.requires_grad_(False)


def _prompt(index: int) -> np.ndarray:
    draw = np.random.default_rng(index)
    return draw.integers(0, VOCABULARY, PROMPT_TOKENS).astype(np.uint32)


# ---- log-probabilities over an update ------------------------------------------------------------


def _logprob_error(tokens: int) -> Case:
    old, new = _model(0), _model(1)
    engine = VllmEngine(old.config, old.state_dict(), V1, BATCH, CONTEXT)
    sources = np.full(PROMPT_TOKENS, PROMPT, np.uint8)
    sampling, nothing = Sampling(temperature=0, tokens_max=tokens), np.zeros(0, np.float32)
    engine.submit(Request("t", 0, _prompt(0), sources, sampling, 0, nothing))
    found: list[int] = []
    logprobs: list[float] = []
    before = 0
    while engine.running():
        for emission in engine.poll(0.01):
            found += emission.tokens.tolist()
            logprobs += emission.logprobs.tolist()
            before += len(emission.tokens) * (emission.version == V1)
        if engine.version == V1 and engine.stats().tokens >= tokens // 3:
            engine.update(Update(V2, new.state_dict()), "in_flight")
    greedy, wanted = _over_old_cache(old, new, found, before)
    same = sum(a == b for a, b in zip(found, greedy, strict=True))
    error = float((torch.tensor(logprobs) - wanted).abs().max())
    note = f"{same} of {tokens} greedy tokens the same, {before} of them before the update"
    return alone("vllm_logprob_error", error, "nats", at_most=ERROR_MAX, note=note)


def _over_old_cache(
    old: PreTrainedModel, new: PreTrainedModel, chosen: list[int], before: int
) -> tuple[list[int], torch.Tensor]:
    cache, greedy, logprobs = DynamicCache(), [], []
    step = torch.tensor([_prompt(0).tolist()])
    for count, token in enumerate(chosen):
        model = old if count < before else new
        with torch.inference_mode():
            logits = model(step, past_key_values=cache, use_cache=True).logits[0, -1]
        greedy.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[token]))
        step = torch.tensor([[token]])
    return greedy, torch.tensor(logprobs)


# ---- tokens per second ---------------------------------------------------------------------------


def _overhead(pairs: int, lengths: list[int]) -> Case:
    model = _model(0)
    with tempfile.TemporaryDirectory(prefix="rollstream-vllm-") as folder:
        ours = _worker(model, lengths, Path(folder))
        bare, close = _bare(model, lengths, Path(folder))
        values: list[float] = []
        references: list[float] = []
        for pair in range(pairs + 1):
            theirs, mine = _tokens_per_s(bare, lengths), _tokens_per_s(ours, lengths)
            if pair:  # the first pair warms up
                values.append(mine)
                references.append(theirs)
        close()
    note = f"{len(lengths)} × {lengths[0]} tokens, {BATCH} at a time"
    return paired("vllm_overhead", values, "tokens/s", "bare AsyncLLM", references, 0.95, note)


def _tokens_per_s(run: Callable[[], None], lengths: list[int]) -> float:
    began = time.perf_counter()
    run()
    return sum(lengths) / (time.perf_counter() - began)


class Until:
    """A stop that is set once something is so."""

    def __init__(self, so: Callable[[], bool]) -> None:
        self.is_set = so

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self.is_set()


def _worker(model: PreTrainedModel, lengths: list[int], folder: Path) -> Callable[[], None]:
    """A rollout that is handed orders, until all of their trajectories are in the log."""
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    bus.create(catalogue())
    store = open_store(f"file:{folder / 'store'}")
    engine = VllmEngine(model.config, model.state_dict(), V1, BATCH, CONTEXT)
    settings = RolloutSettings(slots=BATCH, context_max=CONTEXT)
    voice = Voice(bus, Outbox(bus), "rollout-0", 1, settings, Pulse(settings.status_s))
    judging = Judging(RewardPool(TaskSettings()), False, 1, lambda: V1, late=True)
    orders = Orders(bus, "rollout-0", 1)
    rollout = Rollout(settings, engine, WeightsFollower(bus, store), orders, judging, voice)
    rounds = [0]

    def run() -> None:
        rounds[0] += 1
        for index, length in enumerate(lengths):
            name, sampling = f"{rounds[0]}.{index}", Sampling(tokens_max=length)
            orders.waiting.append(
                Assignment(
                    "start", name, index, 0, 1, "rollout-0", 1, V1, "t", _prompt(index), sampling, 7
                )
            )
        wanted = rounds[0] * len(lengths)
        rollout.run(Until(lambda: sum(bus.end("trajectories").values()) >= wanted))  # type: ignore[arg-type]

    return run


def _bare(
    model: PreTrainedModel, lengths: list[int], folder: Path
) -> tuple[Callable[[], None], Callable[[], None]]:
    """vLLM's own asynchronous engine and nothing else, as many requests at a time."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    model.save_pretrained(folder / "model")
    loop = asyncio.new_event_loop()
    arguments = AsyncEngineArgs(
        model=str(folder / "model"),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=CONTEXT,
        max_num_seqs=BATCH,
        kv_cache_memory_bytes=256 << 20,
        block_size=32,
        logprobs_mode="processed_logprobs",
    )

    async def opened() -> Any:
        return AsyncLLM.from_engine_args(arguments)

    engine = loop.run_until_complete(opened())
    rounds = [0]

    async def one(index: int, room: asyncio.Semaphore) -> None:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=lengths[index],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": _prompt(index).tolist()}
        async with room:
            async for _ in engine.generate(prompt, params, f"{rounds[0]}.{index}"):
                pass

    async def all_of_them() -> None:
        room = asyncio.Semaphore(BATCH)
        await asyncio.gather(*(one(index, room) for index in range(len(lengths))))

    def run() -> None:
        rounds[0] += 1
        loop.run_until_complete(all_of_them())

    def close() -> None:
        engine.shutdown()
        loop.run_until_complete(asyncio.sleep(0.5))  # its tasks hear of it while there is a loop

    return run, close
