"""Rank 0 sends commands and the other ranks execute them, all in one order, so every rank enters
the collectives of a sharded model in the same order.

Interleaving. Three threads of rank 0 send commands: the trainer's (rounds, updates, copies; it
takes part in the collective itself, inside `command`), the publisher's (writing; no collective
follows) and a ticker. A command is sent, and its collective is run, under one lock; another rank
executes one command after the other. So no other command is sent between a command and the end of
its collective, and two ranks are never in different collectives. Replies to writing commands use a
process group and a thread of their own: a rank that writes still trains, and a rank that trains
still replies.

A waiting rank receives a tick at least four times per timeout. A rank that receives nothing for
that long ends, because rank 0 is gone or hangs. A lost rank is detected by the next send and named.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from rollstream.consumers.trainer.sharded.messages import (
    RankCommand,
    Tick,
    WriteReply,
    decode,
    encode,
)
from rollstream.consumers.trainer.sharded.ranks import RankLost, Ranks
from rollstream.errors import RollstreamError

log = logging.getLogger(__name__)


TICKS_PER_TIMEOUT = 4
ROLL_CALL_S = 2.0
"""Longest wait of a roll call; a closed connection fails at once."""
MESSAGE_BYTES_MAX = 1 << 31
"""Largest message; a longer one is not a message of this protocol."""


class RankCommander:
    """Rank 0's side: sends commands to all other ranks. Thread-safe."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._others = range(1, ranks.size)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._failed: RankLost | None = None
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)
        self._ticker.start()

    @contextmanager
    def command(self, command_of: Callable[[int], RankCommand]) -> Generator[None]:
        """Send `command_of(rank)` to every other rank, then run the block, which is rank 0's own
        part. No other command is sent before the block ends. `RankLost` names the rank that is
        gone.
        """
        with self._lock:
            self._send_all(command_of)
            try:
                yield
            except RollstreamError:
                raise
            except RuntimeError as error:  # collectives raise no more specific type
                raise self._lost(error) from error

    def send(self, command_of: Callable[[int], RankCommand]) -> None:
        """As `command`, without a part for rank 0."""
        with self.command(command_of):
            pass

    def close(self, last: RankCommand) -> None:
        """Send the last command. Idempotent, and harmless after a failure."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._ticker.join()
        if self._failed is None:
            self.send(lambda rank: last)

    def _send_all(self, command_of: Callable[[int], RankCommand]) -> None:
        if self._failed is not None:
            raise self._failed
        for rank in self._others:
            began = time.monotonic()
            try:
                send(encode(command_of(rank)), rank, self._ranks.commands)
            except RuntimeError as error:
                is_late = time.monotonic() - began > self._ranks.timeout_s / 2
                raise self._fail([] if is_late else [rank], f"rank {rank}", error) from error

    def _lost(self, error: RuntimeError) -> RankLost:
        """The error of a failed collective. The failure does not name a rank, so each rank is
        probed.
        """
        return self._fail(self._roll_call(), "a rank", error)

    def _fail(self, gone: Sequence[int], late: str, error: RuntimeError) -> RankLost:
        """The error to raise; later commands raise it too."""
        if gone:
            what = f"rank {', '.join(map(str, gone))} of the trainer is gone"
        else:
            limit = f"{self._ranks.timeout_s:g} s (trainer.ranks_timeout_s)"
            what = f"{late} of the trainer failed or does not answer within {limit}"
        self._failed = RankLost(f"{what}; all ranks end and restart together ({error})")
        return self._failed

    def _roll_call(self) -> list[int]:
        """The ranks whose connection is closed. A busy rank does not receive the probe, which is no
        sign of loss. The group cannot be used afterwards.
        """
        if not self._others:
            return []

        def is_gone(rank: int) -> bool:
            began = time.monotonic()
            size = torch.zeros(1, dtype=torch.int64)
            try:
                work = dist.isend(size, rank, group=self._ranks.commands)
                if work is not None:
                    work.wait(timedelta(seconds=ROLL_CALL_S))
            except RuntimeError:
                return time.monotonic() - began < ROLL_CALL_S / 2
            return False

        with ThreadPoolExecutor(len(self._others)) as pool:
            found = list(pool.map(is_gone, self._others))
        return [rank for rank, gone in zip(self._others, found, strict=True) if gone]

    def _tick(self) -> None:
        while not self._closed.wait(self._ranks.timeout_s / TICKS_PER_TIMEOUT / 2):
            try:
                self.send(lambda rank: Tick())
            except RankLost as error:
                log.error("%s", error)
                return


def receive_command(ranks: Ranks) -> RankCommand:
    """The next command for this rank; `RankLost` if rank 0 sends nothing within the timeout."""
    try:
        data = receive(0, ranks.commands)
    except RuntimeError as error:
        raise RankLost(f"rank {ranks.rank}: rank 0 is gone or silent ({error})") from error
    return decode(data, RankCommand)


def send_reply(value: WriteReply, ranks: Ranks) -> None:
    """Send a reply to rank 0."""
    send(encode(value), 0, ranks.replies)


def receive_reply(rank: int, ranks: Ranks) -> WriteReply:
    """The reply of this rank; `RankLost` if none comes."""
    try:
        return decode(receive(rank, ranks.replies), WriteReply)
    except RuntimeError as error:
        raise RankLost(f"rank {rank} of the trainer does not answer: {error}") from error


def send(data: bytes, rank: int, group: dist.ProcessGroup) -> None:
    """Send the length, then the bytes."""
    dist.send(torch.tensor([len(data)]), rank, group=group)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank, group=group)


def receive(rank: int, group: dist.ProcessGroup) -> bytes:
    """Receive one message of `send`; `RuntimeError` if its length is out of bounds."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank, group=group)
    length = int(size)
    if not 0 < length <= MESSAGE_BYTES_MAX:
        raise RuntimeError(f"a message of {length} bytes from rank {rank}")
    data = torch.empty(length, dtype=torch.uint8)
    dist.recv(data, rank, group=group)
    return data.numpy().tobytes()
