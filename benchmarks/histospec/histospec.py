"""Drafts from history (docs/explanation/drafts.md): their cost, their acceptance and their gain on
the passes of `examples/epochs.toml`.

The structure is measured on the recorded answers of one pass, generation on passes from the second
on, with drafts and without. The two sides of a pair take turns of 5 ms, each in a thread of its
own, so that a change of the machine's load affects both; the side that starts alternates from pair
to pair. Seconds are processor time of a side's thread. `histospec_control_64` compares two sides
without drafts in the same way: its distance from 1 is the error of the measurement.

`SUFFIX_TREE` in the environment names the compiled suffix tree of arctic-inference
(docs/explanation/drafts.md describes the build); without it, look-ups are compared with 35 µs,
which was measured once. Progress is printed on stderr.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from benchmarks.case import Case, against, alone, paired
from benchmarks.histospec.acceptance import acceptance, suffix_tree
from benchmarks.histospec.quickstart import quickstart
from benchmarks.runs.epochs import (
    Generated,
    Pass,
    Side,
    batched,
    generate_in_turns,
    history_of,
    history_of_others,
    one_thread,
    recorded,
    requests,
    side_thread,
)
from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.drafts.history import AnswerHistory, prompt_key
from rollstream.streams.records import PROMPT, Trajectory

WINDOW = 8  # tokens requested in a look-up
DEPTH = 64  # of the tree, arctic-inference's default
GOALS = {1: 2.5, 8: 1.86}
OLD_ROWS = 16
OTHERS_ROWS = 1, 8, 16, 32, 64
CONTROL_ROWS = 64
BUSY_S = 1800  # lifetime of a busy process that is not ended


@dataclass(frozen=True, slots=True)
class Sizes:
    """`answers` are generated per pair at batch 1, twice as many at 2, and so on up to
    `answers_max`; batches with a goal are measured in `pairs_goal` pairs, others in `pairs`.
    """

    passes: int
    answers: int
    answers_max: int
    lookups: int
    pairs_goal: int
    pairs: int
    batches: tuple[int, ...]
    batches_busy: tuple[int, ...]
    runs: int
    overrides: tuple[str, ...] = ()


# On a quiet machine: a run of 5 passes takes 3 minutes, the rest 6; `--quick` 2 in all.
WHOLE = Sizes(5, 48, 384, 20_000, 9, 9, (1, 2, 4, 8, 16, 32, 64, 96), (1, 8, 32, 96), 3)
SMALL = Sizes(2, 16, 128, 2_000, 2, 1, (1, 8, 32), (8, 32), 1, ("warmup.steps=400",))


def cases(quick: bool) -> Iterator[Case]:
    """Yields the structure's cases, then generation at several batch sizes."""
    sizes, threads = SMALL if quick else WHOLE, one_thread()
    try:
        with tempfile.TemporaryDirectory(prefix="rollstream-histospec-") as folder:
            print_line(f"a run of {sizes.passes} passes, warm-up included")
            passes = recorded(Path(folder) / "run", sizes.passes, sizes.overrides)
        yield from structure(passes, sizes)
        print_line("acceptance, replayed")
        yield from acceptance(passes)
        yield from generation(passes, sizes)
    finally:
        torch.set_num_threads(threads)
    print_line(f"the quickstart, {sizes.runs} pairs of runs")
    yield from quickstart(sizes.runs)


def print_line(text: str) -> None:
    """Prints the name of the measurement that starts."""
    print(f"histospec: {text} …", file=sys.stderr, flush=True)


# ---- the structure ---------------------------------------------------------------------------


def structure(passes: Sequence[Pass], sizes: Sizes) -> Iterator[Case]:
    """Insertion, memory and look-ups over the pass before the last."""
    answers, later = passes[-2].answers, passes[-1].answers
    tokens = sum(int((a.sources != PROMPT).sum()) for a in answers)
    print_line(f"{len(answers)} answers inserted, {sizes.lookups} look-ups")
    history = AnswerHistory(1 << 18)
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
    history: AnswerHistory, answers: Sequence[Trajectory], later: Sequence[Trajectory], count: int
) -> Case:
    """Contexts of the next pass, looked up in the last one."""
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
    kind = suffix_tree()
    if kind is None:
        note = "no SUFFIX_TREE; against the 16 to 35 µs that one took where it was tried"
        return alone("draft_lookup", 1e6 * ours / count, "µs", at_most=35, note=note)
    tree = kind(DEPTH)
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
    """Returns the fastest time of three."""
    found: list[float] = []
    for _ in range(3):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


# ---- generation ------------------------------------------------------------------------------


def generation(passes: Sequence[Pass], sizes: Sizes) -> Iterator[Case]:
    """Each batch size, with one more busy process and without; then the worst of all."""
    worst, accepted = (float("inf"), ""), 0.0
    fitting = [(now, before) for before, now in pairwise(passes)]
    count = min(sizes.answers * CONTROL_ROWS, sizes.answers_max)
    one, other = _pairs(fitting, CONTROL_ROWS, count, sizes.pairs_goal, None)
    yield _compared(f"histospec_control_{CONTROL_ROWS}", one, other, None)
    yield from (beside := list(_beside_another(fitting, sizes)))
    worst = min([worst, *((case.ratio or 0.0, case.case) for case in beside)])
    for batch in sizes.batches:
        pairs = sizes.pairs_goal if batch in GOALS else sizes.pairs
        count = min(sizes.answers * batch, sizes.answers_max)
        drafted, plain = _pairs(fitting, batch, count, pairs)
        case = _compared(f"histospec_batch_{batch}", drafted, plain, GOALS.get(batch))
        yield case
        worst = min(worst, (case.ratio or 0.0, f"at batch {batch}"))
        if batch == 1:
            accepted = _acceptance(drafted)
    old = [(passes[-1], passes[0])]
    drafted, plain = _pairs(old, OLD_ROWS, sizes.answers_max, sizes.pairs)
    case = _compared("histospec_old", drafted, plain, None)
    yield case
    worst = min(worst, (case.ratio or 0.0, "with a history of the first pass"))
    for batch in OTHERS_ROWS:
        count = min(sizes.answers * batch, sizes.answers_max)
        drafted, plain = _pairs(fitting, batch, count, sizes.pairs, history_of_others)
        case = _compared(f"histospec_others_{batch}", drafted, plain, None)
        yield case
        worst = min(worst, (case.ratio or 0.0, f"at batch {batch}, other prompts' answers"))
    yield alone("histospec_accepted", accepted, "share", note="batch 1; the paper: 0.65 to 0.79")
    yield alone("histospec_worst", worst[0], "ratio", at_least=0.97, note=worst[1])


def _beside_another(fitting: Sequence[tuple[Pass, Pass]], sizes: Sizes) -> Iterator[Case]:
    """The same while another process keeps a core busy: for drafts with gain, and for drafts
    without.
    """
    with busy_process():
        for batch in sizes.batches_busy:
            count = min(sizes.answers * batch, sizes.answers_max)
            drafted, plain = _pairs(fitting, batch, count, sizes.pairs)
            yield _compared(f"histospec_busy_batch_{batch}", drafted, plain, None)
            drafted, plain = _pairs(fitting, batch, count, sizes.pairs, history_of_others)
            yield _compared(f"histospec_busy_others_{batch}", drafted, plain, None)


@contextmanager
def busy_process() -> Generator[None]:
    """Starts one more busy process for the block; it ends with the block, or by itself."""
    code = f"import time\nend = time.monotonic() + {BUSY_S}\nwhile time.monotonic() < end: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _pairs(
    fitting: Sequence[tuple[Pass, Pass]],
    batch: int,
    count: int,
    pairs: int,
    known: Callable[[Pass], AnswerHistory] | None = history_of,
) -> tuple[list[Generated], list[Generated]]:
    """Generation with drafts and without, in turns, over passes and the histories that they draft
    from.

    One gate and one thread serve all passes, as in a rollout. With `known` None neither side
    drafts.
    """
    drafted: list[Generated] = []
    plain: list[Generated] = []
    gate = DraftGate()
    with side_thread() as drafting, side_thread() as drawing:
        for number in range(pairs):
            now, before = fitting[number % len(fitting)]
            print_line(f"batch {batch}, pair {number + 1} of {pairs}, {count} answers")
            asked = requests(now, count, skip=number // len(fitting) * count)
            history = known(before) if known else None
            sides = [
                Side(drafting, now, asked, batch, history, gate),
                Side(drawing, now, asked, batch, None, DraftGate()),
            ]
            order = -1 if number % 2 else 1
            with_drafts, without = generate_in_turns(sides[::order])[::order]
            drafted.append(with_drafts)
            plain.append(without)
    return drafted, plain


def _compared(
    name: str, drafted: Sequence[Generated], plain: Sequence[Generated], goal: float | None
) -> Case:
    speeds = [one.tokens_per_s for one in drafted]
    bases = [one.tokens_per_s for one in plain]
    return paired(name, speeds, "tokens/s", "drafts off", bases, goal, _note(drafted, plain))


def _note(drafted: Sequence[Generated], plain: Sequence[Generated]) -> str:
    """The share of accepted drafts, and the number of answers that are the same token for token."""
    rows = sum(one.drafts.rows for one in drafted)
    gained = sum(one.drafts.gained for one in drafted)
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
    stats = [one.drafts for one in drafted]
    return sum(s.accepted for s in stats) / max(1, sum(s.proposed for s in stats))
