"""Drafts from history (docs/histospec.md): what they cost, how often they are right, and what they
bring on the passes of `examples/epochs.toml`.

The structure is measured on the recorded answers of one pass, generation on each pass from the
second on, with drafts and without side by side. `SUFFIX_TREE` in the environment names the compiled
suffix tree of arctic-inference (docs/histospec.md says how to build it); without it, look-ups are
held against the 35 µs that were measured once.
"""

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.case import Case, against, alone, paired
from benchmarks.histospec_runs import (
    Generated,
    Pass,
    batched,
    generate,
    history_of,
    one_thread,
    recorded,
    requests,
)
from producers.engines.drafts import History, prompt_key
from producers.engines.drafts.switch import Switch
from streams.records import PROMPT, Trajectory

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96)
WINDOW = 8  # tokens asked for in a look-up
DEPTH = 64  # of the tree, as it is used by vLLM


@dataclass(frozen=True, slots=True)
class Sizes:
    """`answers` are generated per pass at batch 1, twice as many at 2, and so on up to
    `answers_max`.
    """

    passes: int
    answers: int
    answers_max: int
    lookups: int


SMALL, WHOLE = Sizes(2, 16, 192, 2_000), Sizes(8, 64, 1536, 20_000)


def cases(quick: bool) -> Iterator[Case]:
    """The structure, then generation at several batch sizes."""
    sizes, threads = SMALL if quick else WHOLE, one_thread()
    try:
        with tempfile.TemporaryDirectory(prefix="rollstream-histospec-") as folder:
            passes = recorded(Path(folder) / "run", sizes.passes)
        yield from _structure(passes, sizes)
        yield from _generation(passes, sizes)
    finally:
        torch.set_num_threads(threads)


# ---- the structure ---------------------------------------------------------------------------


def _structure(passes: Sequence[Pass], sizes: Sizes) -> Iterator[Case]:
    answers, later = passes[-2].answers, passes[-1].answers
    tokens = sum(int((a.sources != PROMPT).sum()) for a in answers)
    history = History(1 << 18)
    began = time.process_time()
    for some in batched(answers):
        history.insert_all(some)
    speed = tokens / (time.process_time() - began)
    note = f"{len(answers)} answers, {tokens} tokens"
    yield alone("draft_insert", speed, "tokens/s", at_least=200_000, note=note)
    per_token = history.bytes / history.tokens_max
    yield alone("draft_bytes_per_token", per_token, "B", at_most=400, note="of its capacity")
    yield _lookup(history, answers, later, sizes.lookups)


def _lookup(
    history: History, answers: Sequence[Trajectory], later: Sequence[Trajectory], count: int
) -> Case:
    """Contexts of the next pass, looked up in the last."""
    drawn = np.random.default_rng(0)
    places: list[tuple[int, list[int]]] = []
    chosen: list[int] = drawn.integers(len(later), size=count).tolist()
    for number in chosen:
        answer = later[number]
        first = int((answer.sources == PROMPT).sum())
        at = int(drawn.integers(first, len(answer.tokens)))
        key = prompt_key(answer.tokens, answer.sources)
        places.append((key, answer.tokens[:at].tolist()))
    short = [(key, before[-history.context :]) for key, before in places]
    ours = _seconds_each(lambda: [history.draft(key, newest, WINDOW) for key, newest in short])
    tree = _suffix_tree()
    if tree is None:
        note = "no SUFFIX_TREE; against the 16 to 35 µs that one took where it was tried"
        return alone("draft_lookup", 1e6 * ours / count, "µs", at_most=35, note=note)
    for number, answer in enumerate(answers):
        tree.extend_ndarray(number, answer.tokens.astype(np.int32))
    contexts = [np.array(before[-DEPTH:], np.int32) for _, before in places]
    theirs = _seconds_each(
        lambda: [tree.speculate_ndarray(c, WINDOW, 1.0, 0.0, 0.1, False) for c in contexts]
    )
    return against(
        "draft_lookup",
        count / ours,
        "look-ups/s",
        "arctic-inference's suffix tree",
        count / theirs,
        1 / 1.1,
        f"{1e6 * ours / count:.1f} µs against {1e6 * theirs / count:.1f}",
    )


def _seconds_each(work: Callable[[], object]) -> float:
    """Of the fastest of three."""
    found: list[float] = []
    for _ in range(3):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def _suffix_tree() -> Any | None:
    path = os.environ.get("SUFFIX_TREE")
    if not path:
        return None
    spec = importlib.util.spec_from_file_location("_C", path)
    assert spec is not None, f"SUFFIX_TREE={path} is no extension module"
    assert spec.loader is not None, f"SUFFIX_TREE={path} cannot be loaded"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SuffixTree(DEPTH)


# ---- generation ------------------------------------------------------------------------------


def _generation(passes: Sequence[Pass], sizes: Sizes) -> Iterator[Case]:
    goals = {1: 2.5, 8: 1.86}
    worst, accepted = (float("inf"), ""), 0.0
    for batch in BATCHES:
        count = min(sizes.answers * batch, sizes.answers_max)
        drafted, plain = _pairs(passes, batch, count)
        speeds = [one.tokens_per_s for one in drafted]
        ratios = [d.tokens_per_s / p.tokens_per_s for d, p in zip(drafted, plain, strict=True)]
        name, note = f"histospec_batch_{batch}", _note(drafted, plain)
        bases = [one.tokens_per_s for one in plain]
        yield paired(name, speeds, "tokens/s", "drafts off", bases, goals.get(batch), note)
        worst = min(worst, (statistics.median(ratios), f"at batch {batch}"))
        if batch == 1:
            accepted = _acceptance(drafted)
    yield alone("histospec_accepted", accepted, "share", note="the paper: 0.65 to 0.79")
    yield alone("histospec_worst", worst[0], "ratio", at_least=0.97, note=worst[1])


def _pairs(
    passes: Sequence[Pass], batch: int, count: int
) -> tuple[list[Generated], list[Generated]]:
    """Each pass from the second on, with drafts and without; the tokens are the same but for
    rounding.
    """
    drafted: list[Generated] = []
    plain: list[Generated] = []
    for before, now in pairwise(passes):
        asked = requests(now, count)
        plain.append(generate(now, asked, batch, None, Switch()))
        drafted.append(generate(now, asked, batch, history_of(before), Switch()))
    return drafted, plain


def _note(drafted: Sequence[Generated], plain: Sequence[Generated]) -> str:
    """How right drafts were, and how many answers are the same, token for token."""
    rows = sum(one.engine.stats().drafts.rows for one in drafted)
    gained = sum(one.engine.stats().drafts.gained for one in drafted)
    same = sum(
        d.tokens[name] == p.tokens[name]
        for d, p in zip(drafted, plain, strict=True)
        for name in p.tokens
    )
    answers = sum(len(one.tokens) for one in plain)
    per_pass = gained / rows if rows else 1.0
    return (
        f"accepted {_acceptance(drafted):.2f}, {per_pass:.2f} tokens per row and pass, "
        f"{same} of {answers} answers the same"
    )


def _acceptance(drafted: Sequence[Generated]) -> float:
    stats = [one.engine.stats().drafts for one in drafted]
    return sum(s.accepted for s in stats) / max(1, sum(s.proposed for s in stats))
