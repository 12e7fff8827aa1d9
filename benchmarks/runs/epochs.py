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
from producers.engines.base import DraftStats, Emission, Request
from producers.engines.drafts import Answer, History
from producers.engines.drafts.switch import Switch
from producers.engines.options import EngineOptions
from producers.engines.torch_engine import TorchEngine
from producers.rollout.remembering import LOOK_RECORDS, answer_of
from rollstream.config import load
from rollstream.folder import run_log, store_url
from storage.connect import open_store
from storage.model import model_from_version
from streams.reader import TopicReader, from_begin
from streams.records import PROMPT, Sampling, Trajectory, Version
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
    bus, store = run_log(c, folder), open_store(store_url(c, folder))
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


def history_of(before: Pass) -> History:
    """What a rollout remembers of a pass."""
    history = History(1 << 18)
    for some in batched(before.answers):
        history.insert_all(some)
    return history


def history_of_others(before: Pass) -> History:
    """The same answers, each under the prompt of another one: hardly any of it is right."""
    told = batched(before.answers)
    prompts = list(dict.fromkeys(answer.prompt for some in told for answer in some))
    other = dict(zip(prompts, prompts[1:] + prompts[:1], strict=True))
    history = History(1 << 18)
    for some in told:
        history.insert_all([replace(answer, prompt=other[answer.prompt]) for answer in some])
    return history


def batched(answers: Sequence[Trajectory]) -> list[list[Answer]]:
    """As many at once as a rollout takes in."""
    found = [answer_of(answer) for answer in answers]
    return [found[i : i + LOOK_RECORDS] for i in range(0, len(found), LOOK_RECORDS)]


def requests(of: Pass, count: int, skip: int = 0) -> list[Request]:
    """`count` answers of a pass, to be generated anew; those before them are skipped, and it begins
    again at the first after the last.
    """
    found: list[Request] = []
    stops = {int(answer.tokens[-1]) for answer in of.answers if answer.finish == "stop"}
    sampling = Sampling(1.0, tokens_max=420, stop=tuple(sorted(stops)))
    nothing = np.zeros(0, np.float32)
    answers = sorted(of.answers, key=lambda t: (t.group, t.index))
    skip %= len(answers)
    for answer in (answers[skip:] + answers[:skip])[:count]:
        prompt = answer.tokens[answer.sources == PROMPT]
        sources = np.full(len(prompt), PROMPT, np.uint8)
        name = f"{answer.group}-{answer.index}"
        found.append(Request(name, answer.group, prompt, sources, sampling, SEED, nothing))
    return found


def generate(
    of: Pass, asked: Sequence[Request], slots: int, history: History | None, switch: Switch
) -> Generated:
    """All of it through one engine; without a history the engine knows nothing of drafts."""
    weights = of.model.state_dict()
    engine = TorchEngine(
        of.model.config,
        weights,
        Version(0, 1),
        EngineOptions(slots, CONTEXT, drafts=history, switch=switch),
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
