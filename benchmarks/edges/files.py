"""Looking commands on hostile runs, archives and backups (`testbed/hostile_runs`).

`edges_files` counts the calls after which a file outside of the received folder was changed,
created or deleted, a module that the run names was imported or called, or a foreign host had got a
secret. Besides: calls that changed the received folder itself, that copied a secret of the user's
into an output, that did not end within a minute, and that ended with a traceback. Commands are
forks of a process that has imported the program; `tests/edges` runs real processes.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

from benchmarks.case import Case, alone
from testbed.hostile_runs.calls import Call
from testbed.hostile_runs.case import Case as HostileCase
from testbed.hostile_runs.cases import BY_NAME
from testbed.hostile_runs.matrix import Matrix
from testbed.hostile_runs.selection import CORE, every_call, rotating
from testbed.hostile_runs.trial import FAULTS, HARMS, Attempt
from testbed.servers.guard import memory_folder

WORKERS = 2
QUICK_CALLS = 2
OTHERS = tuple(kind for kind in FAULTS if kind not in HARMS)
EXAMPLES = 3

Work = tuple[HostileCase, Sequence[Call]]


def cases(quick: bool) -> Iterator[Case]:
    """Yields the count of harmful calls, then the counts of other faults."""
    work = list(rotating([BY_NAME[name] for name in CORE], QUICK_CALLS) if quick else every_call())
    attempts = _attempts(work)
    harmful = [done for done in attempts if done[1].has(*HARMS)]
    what = f"{len(attempts)} calls on {len(work)} hostile folders"
    yield alone("edges_files", len(harmful), "calls", at_most=0, note=what + _examples(harmful))
    counts = Counter(kind for _, done in attempts for kind in OTHERS if done.has(kind))
    for kind in OTHERS:
        faulty = [done for done in attempts if done[1].has(kind)]
        yield alone(
            f"edges_files_{kind}", counts[kind], "calls", note=_examples(faulty).lstrip("; ")
        )


def _examples(faulty: Sequence[tuple[str, Attempt]]) -> str:
    texts = [f"{done.call} on {name}" for name, done in faulty[:EXAMPLES]]
    return f"; {', '.join(texts)}" if texts else ""


def _attempts(work: Sequence[Work]) -> list[tuple[str, Attempt]]:
    """Returns by case's name what each call did; workers take the next case each."""
    queue: SimpleQueue[Work] = SimpleQueue()
    for item in work:
        queue.put(item)
    folder = tempfile.TemporaryDirectory(dir=memory_folder())
    with folder as root, ThreadPoolExecutor(WORKERS) as pool:
        parts = [pool.submit(_work, Path(root) / str(number), queue) for number in range(WORKERS)]
        return [done for part in parts for done in part.result()]


def _work(root: Path, queue: "SimpleQueue[Work]") -> list[tuple[str, Attempt]]:
    done: list[tuple[str, Attempt]] = []
    with Matrix(root, is_warm=True) as matrix:
        while True:
            try:
                case, calls = queue.get_nowait()
            except Empty:
                return done
            done += ((case.name, attempt) for _, attempt in matrix.attempts([case], calls))
