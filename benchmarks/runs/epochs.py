"""A recorded run of `examples/epochs.toml`, and the generation of its passes anew: the same prompts
under the weights that each pass had, drafts from what the log says of the pass before.

Only the engine is timed: processor time of one thread, with and without drafts side by side, the
same seeds and so the same tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.runs.measured import run
from rollstream.config.config import load
from rollstream.config.run_folder import open_run_log_for_writing, store_url
from rollstream.producers.drafts import AnswerHistory, HistoryAnswer
from rollstream.producers.drafts.feed import POLL_RECORDS_MAX, answer_from_record
from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.engines.base import DraftStats, Emission, EngineOptions, GenerationRequest
from rollstream.producers.engines.torch import TorchEngine
from rollstream.storage.models import model_from_version
from rollstream.storage.stores.connect import open_store
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import PROMPT, Trajectory
from rollstream.streams.values import Sampling, Version
from testbed.repository import EXAMPLES

EXAMPLE = EXAMPLES / "epochs.toml"
PROMPTS, PASS_STEPS, CONTEXT = 192, 8, 512
SEED = 1  # not the run's: the answers are other samples than those in the log


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the prompts: the weights in its middle, and what was answered in it."""

    number: int
    model: PreTrainedModel
    answers: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens per second of processor time, the tokens themselves, and what drafting came to."""

    tokens_per_s: float
    tokens: dict[str, list[int]]
    drafts: DraftStats


def recorded(folder: Path, passes: int, overrides: Sequence[str] = ()) -> list[Pass]:
    """Run the example for so many passes and read it; a version of the middle of each is kept."""
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
    """What a rollout remembers of a pass."""
    history = AnswerHistory(1 << 18)
    for some in batched(before.answers):
        history.insert_all(some)
    return history


def history_of_others(before: Pass) -> AnswerHistory:
    """The same answers, each under the prompt of another one: hardly any of it is right."""
    told = batched(before.answers)
    prompts = list(dict.fromkeys(answer.prompt for some in told for answer in some))
    other = dict(zip(prompts, prompts[1:] + prompts[:1], strict=True))
    history = AnswerHistory(1 << 18)
    for some in told:
        history.insert_all([replace(answer, prompt=other[answer.prompt]) for answer in some])
    return history


def batched(answers: Sequence[Trajectory]) -> list[list[HistoryAnswer]]:
    """As many at once as a rollout takes in."""
    found = [answer_from_record(answer) for answer in answers]
    return [found[i : i + POLL_RECORDS_MAX] for i in range(0, len(found), POLL_RECORDS_MAX)]


def requests(of: Pass, count: int, skip: int = 0) -> list[GenerationRequest]:
    """`count` answers of a pass, to be generated anew; those before them are skipped, and it begins
    again at the first after the last.
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


def generate(
    of: Pass,
    asked: Sequence[GenerationRequest],
    slots: int,
    history: AnswerHistory | None,
    gate: DraftGate,
) -> Generated:
    """All of it through one engine; without a history the engine knows nothing of drafts."""
    weights = of.model.state_dict()
    engine = TorchEngine(
        of.model.config,
        weights,
        Version(0, 1),
        EngineOptions(slots, CONTEXT, drafts=history, gate=gate),
    )
    for request in asked:
        engine.submit(request)
    emissions: list[Emission] = []
    began = time.process_time()
    while news := engine.poll(60.0):
        emissions += news
    seconds = time.process_time() - began
    tokens: dict[str, list[int]] = {}
    for emission in emissions:
        tokens.setdefault(emission.trajectory, []).extend(emission.tokens.tolist())
    return Generated(sum(map(len, tokens.values())) / seconds, tokens, engine.stats().drafts)


def one_thread() -> int:
    """Torch computes in this thread alone; returns what it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return threads
