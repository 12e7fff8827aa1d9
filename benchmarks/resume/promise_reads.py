"""The speed of audit and replay on an archive, against pyarrow alone on the same columns of the
same files.

`audit_read` is a whole `rollstream audit` of an archive alone, from listing it to the result. It
reads all columns: the ledger's hashes cover every byte of a record. `replay_read` is the reading
part of a replay: the ledger, then all members of each take's groups in the order of the takes, as
the bytes that they had in the log, from headers and arrays alone; its note gives the ratio after
decoding and checking them as the trainer does. Pyarrow alone reads all columns of the files of the
same topics by path into tables, without hashing or checking. Both sides use one thread and are
measured in CPU seconds, because reading waits for nothing here; sides take turns.

`audit_read` misses its goal at 512 tokens. Per trajectory pyarrow alone takes 8 µs; the audit 18:
reading 7, of which 5 are the three lists of a value per token; bytes joined 1, their hashes and
views 1; columns compared with headers 2.5; rules over rows 2.5; ledger and admissions 4, which name
each trajectory twice. Measured and kept: batches sized by memory (7 less) and rules applied only to
records of their topics. Measured and not kept: reading only the columns that are checked (0.9 less,
and damage in the others would go unseen), headers joined by Arrow (0.2 more), no garbage collection
(0.4 less).

A page that a process touches for the first time costs 2.2 µs on a virtual machine, so both sides
depend on memory that is used again. `replay_read` keeps no record that was returned and copies one
when it is asked for: 0.5 to 0.9 pages a record in place of 1.3 to 1.6. Measured and not kept: huge
pages (0.6 to 11 µs a record, because the kernel may have to move memory first), mapped files and
pre-buffering (nothing), batches of 2 MiB (2 to 4 more for the audit).
"""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.case import Case, paired
from benchmarks.resume.promise_archive import MAX_LAG, RUN, record_run
from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.recorded_groups import fetch_group
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.keep.replay.recorded_steps import read_recorded
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.archive.reading import archived_files, local_path
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.streams.values import Member

STEPS = {512: 400, 8192: 26}
"""By tokens per trajectory: about 125 MB of trajectories each."""
QUICK = 4
GOAL = 0.5
RULE = training_rule(TrainerSettings(), MAX_LAG, keep_version=False)


def cases(quick: bool) -> Iterator[Case]:
    """Yields audit and replay, at 512 and at 8 192 tokens."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    for tokens, steps in STEPS.items():
        with tempfile.TemporaryDirectory(prefix="rollstream-promise-") as folder:
            store = open_store(f"file:{folder}")
            size = record_run(store, tokens, steps // QUICK if quick else steps)
            yield from _at_length(store, tokens, size / 1e6, 3 if quick else 11)


def _at_length(store: ObjectStore, tokens: int, megabytes: float, pairs: int) -> Iterator[Case]:
    suffix = "" if tokens == 512 else f"_{tokens >> 10}k"
    steps = [_pyarrow_alone, _audit, _replay, _replay_decoded]
    seconds = [_in_turn(steps, store, turn) for turn in range(pairs + 1)][1:]
    alone, audit, replay, decoded = (
        [megabytes / pair[side] for pair in seconds] for side in range(4)
    )
    note = f"{megabytes:,.0f} MB of trajectories of {tokens} tokens, CPU time"
    whose = "pyarrow alone, same files"
    yield paired(f"audit_read{suffix}", audit, "MB/s", whose, alone, GOAL, note)
    also = paired("", decoded, "", "", alone)
    case = paired(f"replay_read{suffix}", replay, "MB/s", whose, alone, GOAL, note)
    yield dataclasses.replace(case, note=f"{case.note}; decoded {also.ratio:.2f}")


def _pyarrow_alone(store: ObjectStore) -> None:
    for file in archived_files(store, RUN):
        path = local_path(store, file.key)
        assert path is not None
        pq.read_table(path, use_threads=False, partitioning=None)


def _audit(store: ObjectStore) -> None:
    results = Audit(None, store, RUN, AuditPolicy(MAX_LAG, rule=RULE)).check()
    assert not sum(result.violations for result in results), results


def _replay(store: ObjectStore) -> None:
    log = LogView(None, store, RUN)
    for members in _taken(log):
        for member in members:
            at = member.at
            (found,) = log.read("trajectories", {at.partition: at.offset}, records_max=1)
            assert found.offset == at.offset


def _replay_decoded(store: ObjectStore) -> None:
    log = LogView(None, store, RUN)
    for members in _taken(log):
        fetch_group(log, members)


def _taken(log: LogView) -> Iterator[tuple[Member, ...]]:
    """Members of each group, in the order in which the ledger takes them."""
    recorded = read_recorded(log)
    for step in sorted(recorded.takes):
        for take in recorded.takes[step]:
            yield from (group.members for group in take.groups)


def _in_turn(
    steps: list[Callable[[ObjectStore], None]], store: ObjectStore, turn: int
) -> tuple[float, ...]:
    """CPU seconds of each step; the order alternates from turn to turn."""
    seconds = [0.0] * len(steps)
    for index in range(len(steps)):
        chosen = (index + turn) % len(steps)
        started = time.process_time()
        steps[chosen](store)
        seconds[chosen] = time.process_time() - started
    return tuple(seconds)
