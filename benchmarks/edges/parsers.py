"""Damaged inputs for every parser of foreign text and bytes (`testbed/hostile/parsers`), seeded, in
this process: `edges_parsers` counts the faults. Each input is parsed, refused by a documented
error, or a fault: another exception, or more than `CPU_S` of CPU time.

Servers of each HTTP layer get damaged requests over a socket. A fault is there a status of 5xx that
nothing foresaw, a logged exception, or a server that does not answer the next request. Texts and
bytes are also tried at two lengths: a parser of linear time needs about ten times as long for ten
times the length, and above `GROWTH_MAX` times it is a fault.
"""

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.case import Case, alone
from testbed.hostile.damage import PIECES, TAILS
from testbed.hostile.parsers.catalogue import fuzzed_parsers
from testbed.hostile.parsers.http import damaged_request, exchange, is_alive, unforeseen
from testbed.hostile.parsers.parser import FuzzedParser
from testbed.hostile.parsers.servers import SERVERS, open_server

SEED = 39
INPUTS, INPUTS_QUICK = 200_000, 4_000
REQUESTS, REQUESTS_QUICK = 1_000, 30  # of each server
CPU_S = 1.0
SHORT, LONG, GROWTH_MAX, NOISE_S = 10_000, 100_000, 30, 0.05
FAULTS_NAMED = 5


@dataclass
class Tally:
    """Counts inputs by what became of them; `longest` is the largest CPU time with its parser."""

    ends: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list[str])
    longest: tuple[float, str] = (0.0, "")

    def count(self, parser: FuzzedParser, given: object, folder: Path) -> float:
        """Try one input, and return its CPU time."""
        began_s = time.process_time()
        try:
            self.ends["parsed" if parser.is_parsed(given, folder) else "refused"] += 1
        except Exception as error:  # noqa: BLE001 (what passes is what is counted)
            self.faults.append(f"{parser.name}: {type(error).__name__}: {str(error)[:100]}")
        used_s = time.process_time() - began_s
        self.longest = max(self.longest, (used_s, parser.name))
        if used_s > CPU_S:
            self.faults.append(f"{parser.name}: {used_s:.1f} s of CPU time")
        return used_s


def cases(quick: bool) -> Iterator[Case]:
    """Goal: 0."""
    inputs, requests = (INPUTS_QUICK, REQUESTS_QUICK) if quick else (INPUTS, REQUESTS)
    parsers, tally, began_s = fuzzed_parsers(), Tally(), time.monotonic()
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for parser in parsers.values():
            for number in range(-(-inputs // len(parsers))):
                with tempfile.TemporaryDirectory(prefix="rollstream-parsers-") as folder:
                    given = parser.damaged(Random(f"{SEED} {parser.name} {number}"))
                    tally.count(parser, given, Path(folder))
            _grow(parser, tally)
    finally:
        logging.disable(level)
    for name in SERVERS:
        _requests(name, requests, tally)
    total = sum(tally.ends.values()) + len(tally.faults)
    note = (
        f"{total:,} inputs of {len(parsers)} parsers and {len(SERVERS)} servers in "
        f"{time.monotonic() - began_s:.0f} s: "
        f"{', '.join(f'{count:,} {end}' for end, count in sorted(tally.ends.items()))}; "
        f"the longest {tally.longest[0]:.2f} s ({tally.longest[1]})"
    )
    text = "; ".join([note, *tally.faults[:FAULTS_NAMED]])
    yield alone("edges_parsers", len(tally.faults), "faults", at_most=0, note=text)


def _grow(parser: FuzzedParser, tally: Tally) -> None:
    """Try repeated pieces at two lengths, if the parser takes text or bytes."""
    given = parser.damaged(Random(SEED))
    if not isinstance(given, str | bytes):
        return
    with tempfile.TemporaryDirectory(prefix="rollstream-parsers-") as folder:
        for piece in PIECES if isinstance(given, str) else TAILS:
            if not piece:
                continue
            times = [
                tally.count(parser, given + piece * (length // len(piece)), Path(folder))  # type: ignore[operator]
                for length in (SHORT, LONG)
            ]
            if times[1] > NOISE_S and times[1] > GROWTH_MAX * times[0]:
                tally.faults.append(f"{parser.name}: {times} s for repeated {piece[:20]!r}")


class _Exceptions(logging.Handler):
    """Collects the exceptions that a server logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.texts.append(f"{record.getMessage().strip()}: {record.exc_info[1]!r}")


def _requests(name: str, count: int, tally: Tally) -> None:
    """Send damaged requests to one server."""
    logged, logger = _Exceptions(), logging.getLogger()
    logger.addHandler(logged)
    try:
        with tempfile.TemporaryDirectory() as folder, open_server(name, Path(folder)) as server:
            for number in range(count):
                statuses = exchange(server, damaged_request(Random(f"{SEED} {number}"), server))
                problems = [f"status {status}" for status in unforeseen(statuses)] + logged.texts
                logged.texts.clear()
                if not is_alive(server):
                    problems.append("the next request was not answered")
                if problems:
                    tally.faults.append(f"server of {name}: {problems[0]}")
                else:
                    tally.ends["answered" if statuses else "connections ended"] += 1
    finally:
        logger.removeHandler(logged)
