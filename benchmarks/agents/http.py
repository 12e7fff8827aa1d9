"""The cost of the endpoint: tokens per second of turns through HTTP against the same turns in the
process (`agents_endpoint`), and what a turn takes longer than the engine (`agents_latency_ms`). The
engine is `paced`: 16 slots and steps of 8 ms, 2 000 tokens per second.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.case import Case, alone, paired
from rollstream.producers.agents.episodes import TURN_S
from rollstream.producers.engines.base import Emission, Engine, GenerationRequest
from rollstream.producers.engines.paced.build import open_paced
from rollstream.producers.engines.paced_settings import (
    LengthSettings,
    PacedSettings,
    RooflineSettings,
)
from rollstream.streams.connect import open_bus
from rollstream.streams.records import PROMPT
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Sampling, Version
from testbed.agents.rollout import AgentRollout, agent_rollout, assignment

SLOTS, STEP_S, TURN = 16, 0.008, 128
SESSIONS = 32  # for the throughput: slots are busy while answers are on their way
OPEN = 256  # for the latency
CONTEXT = 1 << 16
SETTLE_S = 3.0  # of the first turns, which begin together
PAUSE_S = 0.1  # between two bursts of turns that end about together


def paced_engine(turn: int = TURN) -> Engine:
    settings = PacedSettings(
        roofline=RooflineSettings(
            model_bytes=1, kv_token_bytes=0, token_flops=1e-6, overhead_s=STEP_S
        ),
        lengths=LengthSettings(median=turn, p99=turn),
        emit_every=turn,
    )
    tensors = {"weight": torch.zeros(1)}
    return open_paced(settings, 262, tensors, Version(0, 1), slots=SLOTS, context_max=CONTEXT)


class TimedEngine:
    """Notes for each trajectory the seconds from its submission to the end of its newest turn, and
    when tokens were emitted.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._began: dict[str, float] = {}
        self.seconds: list[float] = []
        self.tokens: list[tuple[float, int]] = []
        """The time of each emission, and its number of tokens."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: GenerationRequest) -> None:
        self._began[request.trajectory] = time.monotonic()
        self._engine.submit(request)

    def append(self, trajectory: str, tokens: Any, noise: str = "") -> None:
        self._began[trajectory] = time.monotonic()
        self._engine.append(trajectory, tokens, noise)

    def poll(self, deadline_s: float) -> list[Emission]:
        found = self._engine.poll(deadline_s)
        now = time.monotonic()
        for each in found:
            self.tokens.append((now, len(each.tokens)))
            if each.finish is not None:
                self.seconds.append(now - self._began[each.trajectory])
        return found

    def tokens_per_s(self, seconds: float) -> float:
        """Returns tokens per second between two emissions about `seconds` apart, the first of them
        `SETTLE_S` after the very first: whole bursts, because turns of equal length end together.
        """
        begin_s = self.tokens[0][0] + SETTLE_S
        ends = [
            at
            for (at, _), (then, _) in pairwise(self.tokens)
            if at >= begin_s and then - at > PAUSE_S
        ]  # of bursts
        first_s = ends[0]
        last_s = max(at for at in ends if at <= first_s + seconds)
        return sum(n for at, n in self.tokens if first_s < at <= last_s) / (last_s - first_s)


def in_process(seconds: float) -> float:
    """Returns tokens per second of the same turns, asked for in the engine's own thread."""
    engine = TimedEngine(paced_engine())
    prompt = np.arange(20, dtype=np.uint32)
    sampling = Sampling(tokens_max=CONTEXT, stop=(258,))
    for name in map(str, range(SESSIONS)):
        engine.submit(
            GenerationRequest(name, 0, prompt, np.full(20, PROMPT, np.uint8), sampling, 0,
                              np.empty(0, np.float32), hold=True)
        )  # fmt: skip
    end_s = time.monotonic() + seconds + 2 * SETTLE_S
    added = np.arange(8, dtype=np.uint32)
    while time.monotonic() < end_s:
        for emission in engine.poll(TURN_S):
            if emission.finish == "stop":
                engine.append(emission.trajectory, added)
    return engine.tokens_per_s(seconds)


def through_http(rollout: AgentRollout, engine: TimedEngine, seconds: float) -> float:
    """Returns tokens per second of turns that a process asks for over HTTP."""
    keys = [rollout.key(name) for name in rollout.agents.open]
    asking = [sys.executable, "-m", "benchmarks.agents.asking", rollout.url]
    subprocess.check_output([*asking, str(seconds + 2 * SETTLE_S), "4096", *keys])
    return engine.tokens_per_s(seconds)


def cases(quick: bool) -> Iterator[Case]:
    yield _endpoint(2 if quick else 10, 1 if quick else 3)
    yield _latency(4 if quick else 20)


def _endpoint(seconds: float, pairs: int) -> Case:
    http: list[float] = []
    direct: list[float] = []
    for _ in range(pairs):
        direct.append(in_process(seconds))
        with tempfile.TemporaryDirectory() as folder:
            bus = open_bus(f"sqlite:{Path(folder) / 'bus'}")
            bus.create(catalogue(1))
            engine = TimedEngine(paced_engine())
            with agent_rollout(bus, engine=engine, context=CONTEXT) as rollout:
                for number in range(SESSIONS):
                    rollout.assign(assignment(f"{number}.0", tokens_max=CONTEXT))
                http.append(through_http(rollout, engine, seconds))
            bus.close()
    note = f"{SESSIONS} sessions, turns of {TURN} tokens, clients at niceness 19"
    return paired("agents_endpoint", http, "tokens/s", "in the process", direct, 0.95, note)


def _latency(seconds: float) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        bus = open_bus(f"sqlite:{Path(folder) / 'bus'}")
        bus.create(catalogue(1))
        engine = TimedEngine(paced_engine(8))
        with agent_rollout(bus, engine=engine, context=CONTEXT) as rollout:
            for number in range(OPEN):
                rollout.assign(assignment(f"{number}.0", tokens_max=CONTEXT))
            keys = [rollout.key(name) for name in rollout.agents.open]
            asking = [sys.executable, "-m", "benchmarks.agents.asking", "--in-turn", rollout.url]
            found = subprocess.check_output([*asking, str(seconds), "4096", *keys])
        bus.close()
    whole = [took for _, took in json.loads(found)]
    added = [1000 * (a - b) for a, b in zip(whole, engine.seconds, strict=False)]
    median = statistics.median(added)
    p95 = sorted(added)[int(0.95 * len(added))]
    note = f"{OPEN} open sessions, one request at a time, {len(added)} turns, p95 {p95:.1f} ms"
    return alone("agents_latency_ms", median, "ms", at_most=2.0, note=note)
