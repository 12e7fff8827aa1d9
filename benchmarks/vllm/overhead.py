"""Tokens per second through a whole rollout worker with its defaults (assignments, partials,
status, a SQLite log, and an empty history to draft from) against bare `AsyncLLM`: the same prompts,
lengths, seeds, number of concurrent requests and requested log-probabilities.

Both have their core in a process of its own with one thread of OpenMP, and one thread of torch on
this side, so that each arm has one core to compute and one to serve. Seconds are wall-clock. Two
processes of the very same engine differ by some 6 % for their whole lives, because of their memory
layout, and the first to be opened was mostly the slower. So every pair is measured in new
processes, each second one with the other arm opened first.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from benchmarks.case import Case, paired
from benchmarks.vllm.models import CONTEXT, V1, prompt_of, small_model
from rollstream.producers.drafts.history import AnswerHistory
from rollstream.producers.drafts.node import CombinedSource, NodeHistory
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.vllm.engine import VllmEngine
from rollstream.producers.rewards.pool import RewardPool
from rollstream.producers.rollout.assignments import AssignmentQueue
from rollstream.producers.rollout.heartbeat import StatusSchedule
from rollstream.producers.rollout.in_progress import InProgress
from rollstream.producers.rollout.judging import Judging
from rollstream.producers.rollout.publisher import RolloutPublisher
from rollstream.producers.rollout.sender import BackgroundSender
from rollstream.producers.rollout.single_turn import SingleTurn
from rollstream.producers.rollout.turn_driver import RolloutParts
from rollstream.producers.rollout.weights import WeightsFollower
from rollstream.producers.rollout.worker import RolloutLoop
from rollstream.producers.settings import RolloutSettings, TaskSettings
from rollstream.storage.stores.connect import open_store
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Assignment
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Sampling

BATCH = 16
SEED = 7
ARMS = "ours", "bare"


def overhead(pairs: int, lengths: list[int]) -> Case:
    """`pairs` is even, so that each arm is opened first as often as the other."""
    found = [_pair(ARMS[pair % 2], lengths) for pair in range(pairs)]
    ours, bare = ([one[arm] for one in found] for arm in ARMS)
    note = f"{len(lengths)} × {lengths[0]} tokens, {BATCH} at a time, 7.4 M parameters, 1 thread"
    return paired("vllm_overhead", ours, "tokens/s", "bare AsyncLLM", bare, 0.95, note)


def _pair(first: str, lengths: list[int]) -> dict[str, float]:
    """Tokens per second of each arm, in new processes."""
    command = [sys.executable, "-m", "benchmarks.vllm.overhead", first, json.dumps(lengths)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


def _measured(first: str, lengths: list[int]) -> dict[str, float]:
    """One run of each warms up; then they take turns, the second one twice in a row."""
    with tempfile.TemporaryDirectory(prefix="rollstream-vllm-") as folder, ExitStack() as closing:
        model, runs = small_model(0), dict[str, Callable[[], None]]()
        for arm in (first, *(arm for arm in ARMS if arm != first)):
            if arm == "ours":
                runs[arm] = _worker(model, lengths, Path(folder))
            else:
                runs[arm] = _bare(model, lengths, Path(folder), closing)
        order = list(runs)
        for arm in order:
            runs[arm]()
        seconds = dict.fromkeys(order, 0.0)
        for arm in (*order, *reversed(order)):
            began = time.perf_counter()
            runs[arm]()
            seconds[arm] += time.perf_counter() - began
    return {arm: 2 * sum(lengths) / seconds[arm] for arm in order}


class Until:
    """A stop event that is set once a condition holds."""

    def __init__(self, so: Callable[[], bool]) -> None:
        self.is_set = so

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self.is_set()


def _worker(model: PreTrainedModel, lengths: list[int], folder: Path) -> Callable[[], None]:
    """A rollout that gets assignments, until all of their trajectories are in the log."""
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    bus.create(catalogue())
    store = open_store(f"file:{folder / 'store'}")
    settings = RolloutSettings(engine="vllm", slots=BATCH, context_max=CONTEXT)
    node = NodeHistory(folder / "drafts", settings.drafts_tokens)
    node.take_over()
    source = CombinedSource(node, AnswerHistory(BATCH * CONTEXT))
    weights = model.state_dict()
    engine = VllmEngine(model.config, weights, V1, EngineOptions(BATCH, CONTEXT, drafts=source))
    voice = RolloutPublisher(
        bus, BackgroundSender(bus), "rollout-0", 1, settings, StatusSchedule(settings.status_s)
    )
    judging = Judging(RewardPool(TaskSettings()), 1, lambda: V1, late=True)
    driver = SingleTurn(RolloutParts(engine, judging, voice, settings))
    orders = AssignmentQueue(bus, "rollout-0", 1)
    rollout = RolloutLoop(WeightsFollower(bus, store), orders, InProgress(driver))
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
    model: PreTrainedModel, lengths: list[int], folder: Path, closing: ExitStack
) -> Callable[[], None]:
    """vLLM's own asynchronous engine alone, with as many concurrent requests."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    model.save_pretrained(folder / "model")  # pyright: ignore[reportUnknownMemberType]
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
    closing.callback(engine.shutdown)
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

    return run


if __name__ == "__main__":
    print(json.dumps(_measured(sys.argv[1], json.loads(sys.argv[2]))), flush=True)
    os._exit(0)  # remaining resources end with this process
