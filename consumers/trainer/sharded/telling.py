"""Rank 0 tells, the others do: every command goes to all ranks in one order, so the collectives of
a sharded model are entered in one order too.

Interleaving. On rank 0 three threads tell: the trainer's (rounds, updates, copies: it then takes
part itself, inside `order`), the publisher's (writing: no collective follows), and a ticker. A
command is sent, and its collective is run, under one lock; another rank does one command after the
other. So between a command and the end of its collective nobody is told anything else, and no two
ranks can be in different collectives. Answers to writing come over a group of their own from a
thread of their own: a rank that writes still trains, and a rank that trains still answers.

A waiting rank hears a tick at least four times per timeout, so one that hears nothing for that long
ends (rank 0 is gone or hangs); a rank that is gone is noticed by the next send and named.
"""

# pyright: reportUnknownMemberType=false

import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from consumers.trainer.sharded.messages import Answer, Tick, Told, decode, encode
from consumers.trainer.sharded.ranks import RankLost, Ranks
from streams.errors import RollstreamError

log = logging.getLogger(__name__)

TICKS_PER_TIMEOUT = 4
CALL_S = 2.0
"""How long a roll call waits; a closed connection is noticed at once."""
BYTES_MAX = 1 << 31
"""Of one message: a length above it is not one of ours."""


class Teller:
    """Rank 0's side. Threads may share it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._others = range(1, ranks.size)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._failed: RankLost | None = None
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)
        self._ticker.start()

    @contextmanager
    def order(self, told: Callable[[int], Told]) -> Generator[None]:
        """Tell every other rank `told(rank)`; nobody is told anything else until the block, rank
        0's own part in it, is done. `RankLost` names the rank that is gone.
        """
        with self._lock:
            self._send_all(told)
            try:
                yield
            except RollstreamError:
                raise
            except RuntimeError as error:  # what a collective raises has no type of its own
                raise self._lost(error) from error

    def tell(self, told: Callable[[int], Told]) -> None:
        """As `order`, with nothing to do for rank 0."""
        with self.order(told):
            pass

    def close(self, told: Told) -> None:
        """The last that the others hear; harmless to call twice and after a failure."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._ticker.join()
        if self._failed is None:
            self.tell(lambda rank: told)

    def _send_all(self, told: Callable[[int], Told]) -> None:
        if self._failed is not None:
            raise self._failed
        for rank in self._others:
            began = time.monotonic()
            try:
                send(encode(told(rank)), rank, self._ranks.told)
            except RuntimeError as error:
                is_late = time.monotonic() - began > self._ranks.timeout_s / 2
                raise self._keep([] if is_late else [rank], f"rank {rank}", error) from error

    def _lost(self, error: RuntimeError) -> RankLost:
        """A collective failed, which says nothing of who did: each is asked."""
        return self._keep(self._call(), "a rank", error)

    def _keep(self, gone: Sequence[int], late: str, error: RuntimeError) -> RankLost:
        """What is wrong, for whoever tells next too."""
        if gone:
            what = f"rank {', '.join(map(str, gone))} of the trainer is gone"
        else:
            limit = f"{self._ranks.timeout_s:g} s (trainer.ranks_timeout_s)"
            what = f"{late} of the trainer failed or does not answer within {limit}"
        self._failed = RankLost(f"{what}; all ranks end and start again together ({error})")
        return self._failed

    def _call(self) -> list[int]:
        """Ranks whose connection is closed. Those that are busy do not hear it, which is no sign;
        the group is of no use afterwards.
        """
        if not self._others:
            return []

        def is_gone(rank: int) -> bool:
            began = time.monotonic()
            size = torch.zeros(1, dtype=torch.int64)
            try:
                work = dist.isend(size, rank, group=self._ranks.told)
                if work is not None:
                    work.wait(timedelta(seconds=CALL_S))
            except RuntimeError:
                return time.monotonic() - began < CALL_S / 2
            return False

        with ThreadPoolExecutor(len(self._others)) as pool:
            found = list(pool.map(is_gone, self._others))
        return [rank for rank, gone in zip(self._others, found, strict=True) if gone]

    def _tick(self) -> None:
        while not self._closed.wait(self._ranks.timeout_s / TICKS_PER_TIMEOUT / 2):
            try:
                self.tell(lambda rank: Tick())
            except RankLost as error:
                log.error("%s", error)
                return


def listen(ranks: Ranks) -> Told:
    """The next command for this rank; `RankLost` when rank 0 says nothing for the timeout."""
    try:
        data = receive(0, ranks.told)
    except RuntimeError as error:
        raise RankLost(f"rank {ranks.rank}: rank 0 is gone or says nothing ({error})") from error
    return decode(data, Told)


def answer(value: Answer, ranks: Ranks) -> None:
    """To rank 0."""
    send(encode(value), 0, ranks.answers)


def answer_of(rank: int, ranks: Ranks) -> Answer:
    """What this rank answers; `RankLost` if it does not."""
    try:
        return decode(receive(rank, ranks.answers), Answer)
    except RuntimeError as error:
        raise RankLost(f"rank {rank} of the trainer does not answer: {error}") from error


def send(data: bytes, rank: int, group: dist.ProcessGroup) -> None:
    """The length, then the bytes."""
    dist.send(torch.tensor([len(data)]), rank, group=group)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank, group=group)


def receive(rank: int, group: dist.ProcessGroup) -> bytes:
    """What `send` sent."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank, group=group)
    length = int(size)
    if not 0 < length <= BYTES_MAX:
        raise RuntimeError(f"a message of {length} bytes from rank {rank}")
    data = torch.empty(length, dtype=torch.uint8)
    dist.recv(data, rank, group=group)
    return data.numpy().tobytes()
