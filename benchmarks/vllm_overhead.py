"""Tokens per second through a whole rollout worker (orders, partials, status, a SQLite log) against
bare `AsyncLLM`: the same prompts, lengths, seeds, number of requests at a time and
log-probabilities asked for.

Both have their core in a process of its own with one thread of OpenMP, and one thread of torch on
this side, so that each arm has one core to compute and one to serve. Wall-clock, in pairs of which
every second one begins with the other arm.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from benchmarks.case import Case, paired
from benchmarks.vllm_models import CONTEXT, V1, prompt_of, small_model
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
from streams.records import Assignment, Sampling
from streams.topics import catalogue

BATCH = 16
SEED = 7


def overhead(pairs: int, lengths: list[int]) -> Case:
    model = small_model(0)
    with tempfile.TemporaryDirectory(prefix="rollstream-vllm-") as folder:
        ours = _worker(model, lengths, Path(folder))
        bare, close = _bare(model, lengths, Path(folder))
        times: dict[Callable[[], None], list[float]] = {ours: [], bare: []}
        for pair in range(pairs + 1):
            for run in (ours, bare) if pair % 2 else (bare, ours):
                speed = _tokens_per_s(run, lengths)
                if pair:  # the first pair warms up
                    times[run].append(speed)
        close()
    note = f"{len(lengths)} × {lengths[0]} tokens, {BATCH} at a time, 7.4 M parameters, 1 thread"
    values, references = times[ours], times[bare]
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
            asked = ("t", prompt_of(index), sampling, SEED)
            order = Assignment("start", name, index, 0, 1, "rollout-0", 1, V1, *asked)
            orders.waiting.append(order)
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
        enable_chunked_prefill=False,
        max_num_batched_tokens=2048,
        logprobs_mode="processed_logprobs",
    )

    async def opened() -> Any:
        return AsyncLLM.from_engine_args(arguments)

    engine = loop.run_until_complete(opened())
    rounds = [0]

    async def one(index: int, room: asyncio.Semaphore) -> None:
        params = SamplingParams(
            temperature=1.0,
            seed=index,
            max_tokens=lengths[index],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": prompt_of(index).tolist()}
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
