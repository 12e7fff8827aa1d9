"""A recorded run of `examples/epochs.toml`, and the repeated generation of its passes: the same
prompts under the weights of each pass, with drafts from the log of the pass before.

Only the engine is timed. Two sides, for example with and without drafts, have the same seeds and so
the same tokens. They take turns of `TURN_S`, each in a thread of its own, and a side's seconds are
the processor time of its thread.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.runs.measured import run
from rollstream.producers.drafts.feed import POLL_RECORDS_MAX, answer_from_record
from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.drafts.history import AnswerHistory, HistoryAnswer
from rollstream.producers.engines.base import DraftStats, GenerationRequest
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import open_run_log_for_writing, store_url
from rollstream.storage.stores.connect import open_store
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import PROMPT, Trajectory
from rollstream.streams.values import Sampling, Version
from testbed.repository import EXAMPLES
from testbed.versions import model_from_version

EXAMPLE = EXAMPLES / "epochs.toml"
PROMPTS, PASS_STEPS, CONTEXT = 192, 8, 512
TURN_S = 0.005
SEED = 1  # differs from the run's seed: the answers are other samples than those in the log


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the prompts: the weights at its middle, and its answers."""

    number: int
    model: PreTrainedModel
    answers: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens per second of a side's processor time, the tokens, and the draft statistics."""

    tokens_per_s: float
    tokens: dict[str, list[int]]
    drafts: DraftStats


def recorded(folder: Path, passes: int, overrides: Sequence[str] = ()) -> list[Pass]:
    """Runs the example for so many passes and reads it; a version of the middle of each is kept."""
    steps = passes * PASS_STEPS
    fixed = (f"trainer.steps={steps}", "weights.keep_every=4", "evaluation.enabled=false")
    run(EXAMPLE, folder, [*fixed, *overrides])
    return read(folder, passes)


def read(folder: Path, passes: int) -> list[Pass]:
    """The passes of a finished run."""
    c = load(folder / "config.json")
    bus, store = open_run_log_for_writing(c, folder), open_store(store_url(c, folder))
    reader = TopicReader(bus, "trajectories", from_begin(bus, "trajectories"))
    finished = [
        one.record
        for one in reader.read_to(bus.end("trajectories"))
        if isinstance(one.record, Trajectory) and one.record.finish != "dead"
    ]
    bus.close()
    return [
        Pass(
            number,
            model_from_version(store, Version(number * PASS_STEPS + 4, 1)),
            tuple(t for t in finished if t.group // PROMPTS == number),
        )
        for number in range(passes)
    ]


def history_of(before: Pass) -> AnswerHistory:
    """Returns the history that a rollout has after a pass."""
    history = AnswerHistory(1 << 18)
    for some in batched(before.answers):
        history.insert_all(some)
    return history


def history_of_others(before: Pass) -> AnswerHistory:
    """The same answers, each under the prompt of another one: hardly any draft is accepted."""
    batches = batched(before.answers)
    prompts = list(dict.fromkeys(answer.prompt for some in batches for answer in some))
    other = dict(zip(prompts, prompts[1:] + prompts[:1], strict=True))
    history = AnswerHistory(1 << 18)
    for some in batches:
        history.insert_all([replace(answer, prompt=other[answer.prompt]) for answer in some])
    return history


def batched(answers: Sequence[Trajectory]) -> list[list[HistoryAnswer]]:
    """As many at once as a rollout takes in."""
    found = [answer_from_record(answer) for answer in answers]
    return [found[i : i + POLL_RECORDS_MAX] for i in range(0, len(found), POLL_RECORDS_MAX)]


def requests(of: Pass, count: int, skip: int = 0) -> list[GenerationRequest]:
    """Returns `count` answers of a pass to generate; those before them are skipped, and after the
    last one it continues with the first.
    """
    found: list[GenerationRequest] = []
    stops = {int(answer.tokens[-1]) for answer in of.answers if answer.finish == "stop"}
    sampling = Sampling(1.0, tokens_max=420, stop=tuple(sorted(stops)))
    nothing = np.zeros(0, np.float32)
    answers = sorted(of.answers, key=lambda t: (t.group, t.index))
    skip %= len(answers)
    for answer in (answers[skip:] + answers[:skip])[:count]:
        prompt = answer.tokens[answer.sources == PROMPT]
        sources = np.full(len(prompt), PROMPT, np.uint8)
        name = f"{answer.group}-{answer.index}"
        found.append(
            GenerationRequest(name, answer.group, prompt, sources, sampling, SEED, nothing)
        )
    return found


class Side:
    """One of two generations that are compared: an engine, and a thread that lives as long as the
    side's gate does, since the gate reads that thread's clock. Without a history the engine makes
    no drafts.
    """

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        of: Pass,
        asked: Sequence[GenerationRequest],
        slots: int,
        history: AnswerHistory | None,
        gate: DraftGate,
    ) -> None:
        self._thread = thread
        self._engine = thread.submit(_opened, of, asked, slots, history, gate).result()
        self._tokens: dict[str, list[int]] = {}
        self._seconds = 0.0
        self.count = 0
        """Tokens generated so far."""
        self.ended = False

    def take_turn(self) -> None:
        """Generates for `TURN_S` seconds of this side's thread, or to the end."""
        self._thread.submit(self._generate).result()

    def result(self) -> Generated:
        return Generated(self.count / self._seconds, self._tokens, self._engine.stats().drafts)

    def _generate(self) -> None:
        began = time.thread_time()
        while not self.ended and time.thread_time() - began < TURN_S:
            emissions = self._engine.poll(60.0)
            self.ended = not emissions
            for emission in emissions:
                tokens = self._tokens.setdefault(emission.trajectory, [])
                tokens.extend(emission.tokens.tolist())
                self.count += len(emission.tokens)
        self._seconds += time.thread_time() - began


def side_thread() -> ThreadPoolExecutor:
    """The thread of a side."""
    return ThreadPoolExecutor(1, initializer=one_thread)


def generate_in_turns(sides: Sequence[Side]) -> list[Generated]:
    """Runs all sides to their end. The next turn is always that of the side with the fewest tokens,
    so all do the same work at about the same time, under the same load of the machine.
    """
    while running := [side for side in sides if not side.ended]:
        min(running, key=lambda side: side.count).take_turn()
    return [side.result() for side in sides]


def _opened(
    of: Pass,
    asked: Sequence[GenerationRequest],
    slots: int,
    history: AnswerHistory | None,
    gate: DraftGate,
) -> TorchEngine:
    options = EngineOptions(slots, CONTEXT, drafts=history, gate=gate)
    engine = TorchEngine(of.model.config, of.model.state_dict(), Version(0, 1), options)
    for request in asked:
        engine.submit(request)
    return engine


def one_thread() -> int:
    """Limits torch to this thread; returns the former count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return threads
