"""Drafts from history on vLLM: tokens per second through our engine with drafts on against drafts
off, on the passes of `examples/epochs.toml` as `benchmarks/runs/epochs.py` records them. The
history holds the answers of the pass before; in the worst case each of them under another prompt,
so that next to nothing is accepted.

vLLM computes inside one process with one thread; seconds are processor time. An engine's memory
layout makes it faster or slower for its whole life, so every pair is measured in a process of its
own, each second one with the other arm opened first.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.case import Case, paired
from benchmarks.runs.epochs import (
    CONTEXT,
    Pass,
    history_of,
    history_of_others,
    read,
    recorded,
    requests,
)
from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.engines.base import DraftStats, GenerationRequest
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.settings import VllmSettings
from rollstream.producers.engines.vllm.engine import VllmEngine
from rollstream.streams.values import Version

ARMS = "drafts", "off"
WORST_ROWS, WORST = 16, 0.97
QUICK = ("warmup.steps=400",)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Answers are `per_row` for each row, `answers_max` at most, twice in each arm of a pair."""

    passes: int
    pairs: int
    per_row: int
    answers_max: int
    overrides: tuple[str, ...] = ()


# Reckoned for a quiet machine: a run of 3 passes 2 minutes, a pair half a minute.
WHOLE, SMALL = Sizes(3, 6, 48, 192), Sizes(2, 2, 12, 48, QUICK)


@dataclass(frozen=True, slots=True)
class Pair:
    """The work of one process: `of` is the pass that is generated again, drafting from the one
    before it.
    """

    run: str
    passes: int
    of: int
    rows: int
    answers: int
    fits: bool
    first: str


def drafts(quick: bool) -> Iterator[Case]:
    """`vllm_drafts_batch_1`, `vllm_drafts_batch_8`, `vllm_drafts_worst`."""
    sizes = SMALL if quick else WHOLE
    with tempfile.TemporaryDirectory(prefix="rollstream-vllm-drafts-") as folder:
        run = Path(folder) / "run"
        recorded(run, sizes.passes, sizes.overrides)
        for rows in (1, 8):
            yield _case(f"vllm_drafts_batch_{rows}", run, sizes, rows)
        yield _case("vllm_drafts_worst", run, sizes, WORST_ROWS, fits=False)


def _case(name: str, run: Path, sizes: Sizes, rows: int, *, fits: bool = True) -> Case:
    count = min(sizes.per_row * rows, sizes.answers_max)
    found = [
        _apart(Pair(str(run), sizes.passes, of, rows, count, fits, ARMS[number % 2]))
        for number in range(sizes.pairs)
        for of in (1 + number % (sizes.passes - 1),)
    ]
    on, off = ([one[arm] for one in found] for arm in ARMS)
    guessed, right = (int(sum(one[key] for one in found)) for key in ("proposed", "accepted"))
    history = "of the pass before" if fits else "under other prompts"
    note = f"{right} of {guessed} draft tokens accepted, answers {history}, {rows} rows"
    return paired(name, on, "tokens/s", "drafts off", off, None if fits else WORST, note)


def _apart(pair: Pair) -> dict[str, float]:
    """Measures in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.vllm.drafts", json.dumps(asdict(pair))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1800)
    return json.loads(done.stdout.splitlines()[-1])


def _measured(pair: Pair) -> dict[str, float]:
    """Runs a few answers of each arm first, from which the gate starts to learn; then both take
    turns, the second one twice in a row.
    """
    passes = read(Path(pair.run), pair.passes)
    now, before = passes[pair.of], passes[pair.of - 1]
    order = sorted(ARMS, key=lambda arm: arm != pair.first)
    engines = {arm: _opened(arm, pair, now, before) for arm in order}
    for engine in engines.values():
        _seconds_and_tokens(engine, requests(now, max(4, pair.answers // 4)))
    seconds, tokens = dict.fromkeys(ARMS, 0.0), dict.fromkeys(ARMS, 0)
    learned = engines["drafts"].stats().drafts
    for part, arm in enumerate((*order, *reversed(order))):
        asked = requests(now, pair.answers, skip=part // 2 * pair.answers)
        spent, gained = _seconds_and_tokens(engines[arm], asked)
        seconds[arm] += spent
        tokens[arm] += gained
    came: DraftStats = engines["drafts"].stats().drafts
    return {arm: tokens[arm] / seconds[arm] for arm in ARMS} | {
        "proposed": came.proposed - learned.proposed,
        "accepted": came.accepted - learned.accepted,
    }


def _opened(arm: str, pair: Pair, now: Pass, before: Pass) -> VllmEngine:
    known = None
    if arm == "drafts":
        known = history_of(before) if pair.fits else history_of_others(before)
    model, sizes = now.model, (pair.rows, CONTEXT)
    settings = VllmSettings(process=False)
    return VllmEngine(
        model.config,
        model.state_dict(),
        Version(0, 1),
        EngineOptions(*sizes, drafts=known, gate=DraftGate()),
        settings=settings,
    )


def _seconds_and_tokens(
    engine: VllmEngine, asked: Sequence[GenerationRequest]
) -> tuple[float, int]:
    """Generates all answers to their end."""
    for request in asked:
        engine.submit(request)
    before, began = engine.stats().tokens, time.process_time()
    while engine.running():
        engine.poll(60.0)
    return time.process_time() - began, engine.stats().tokens - before


if __name__ == "__main__":
    print(json.dumps(_measured(Pair(**json.loads(sys.argv[1])))), flush=True)
    os._exit(0)  # remaining resources end with this process
