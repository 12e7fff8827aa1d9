"""Connects the ranks of a trainer. Tensors are exchanged in collectives, operations that all enter
together; each rank derives its next one from the log. A timeout bounds every wait in one (invariant
8); when a rank is lost, all end and restart.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollstream.consumers.trainer.rank_plan import rank_of
from rollstream.errors import ConfigurationError, CorruptObject, ObjectMissing, RollstreamError
from rollstream.storage.weights.checkpoints import CheckpointId
from rollstream.streams.records import TakeFailed

log = logging.getLogger(__name__)

PORT_KEY, START_KEY, END_KEY = "rollstream/port", "rollstream/start", "rollstream/end"
FAILED_KEY, RECORDED_KEY = "rollstream/failed", "rollstream/recorded"
CONNECT_S = 1.0  # longest wait of one attempt to connect to rank 0's store
PAUSE_S = 0.1  # between two attempts, and between two looks at a key of the store
ROLL_CALL_S = 2.0
"""For each rank in a roll call after a failed collective; the probe of a closed connection fails at
once.
"""
REPORT_S = 10.0  # longest wait of a failed rank until rank 0 has recorded its failure


def rendezvous_store(timeout_s: float, environment: Mapping[str, str] = os.environ) -> TCPStore:
    """The key-value store through which ranks find each other, a new one in rank 0's process at
    each start. Raises `RuntimeError` if rank 0 does not open it in time.
    """
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    rank, timeout = rank_of(environment), timedelta(seconds=timeout_s)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return TCPStore(host, port, None, rank == 0, timeout, wait_for_workers=False)
    # `torchrun` keeps this store through all restarts of its processes (torch 2.13): with entries
    # of the previous start gloo would connect to dead processes. So the ranks read only the port of
    # rank 0's own store in it.
    agent_store = TCPStore(host, port, None, False, timeout)
    if rank == 0:
        own_store = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
        agent_store.set(PORT_KEY, str(own_store.port))
        return own_store
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        own_port = int(agent_store.get(PORT_KEY))
        try:
            socket.create_connection((host, own_port), CONNECT_S).close()
        except OSError:  # the port is of a previous start
            time.sleep(PAUSE_S)
            continue
        return TCPStore(host, own_port, None, False, timeout)
    raise RuntimeError(f"rank 0 did not open its store at {host} within {timeout_s:g} s")


class RankLost(RollstreamError, ConnectionError):
    """All ranks end and restart."""


class TermStart(Struct, frozen=True):
    """What all ranks begin a term from: each rank compares the two hashes with its own; all load
    the first of `checkpoints` that no rank finds damaged.
    """

    term: int
    model: str
    settings: str
    checkpoints: tuple[CheckpointId, ...]
    """Newest first, listed after earlier terms were fenced."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """`timeout_s` bounds every collective and every request to `store`.

    No two threads share a process group: main threads use the default one, publishing threads
    `writing`, and a rank whose collective failed `probes`. `store` holds the `TermStart`, the first
    reported failure, and the end of rank 0; a rank that waits for records asks it, and so notices
    when rank 0 is gone.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    writing: dist.ProcessGroup
    probes: dist.ProcessGroup
    store: TCPStore
    timeout_s: float
    _probing: threading.Lock = field(default_factory=threading.Lock)

    def announce_start(
        self, term: int, model: str, settings: str, checkpoints: Iterable[CheckpointId]
    ) -> None:
        """Is called once, on rank 0; the others wait in `await_start`."""
        start = TermStart(term, model, settings, tuple(checkpoints))
        self.store.set(START_KEY, msgspec.json.encode(start).decode())

    def await_start(self, on_pause: Callable[[], object]) -> TermStart | None:
        """Waits without limit; None if rank 0 ended before. `on_pause`, called before each pause,
        shows that the caller lives. Raises `RankLost` if rank 0 is gone.
        """
        while not self._is_set(START_KEY):
            if self.has_ended():
                return None
            on_pause()
            time.sleep(PAUSE_S)
        return msgspec.json.decode(self.store.get(START_KEY), type=TermStart)

    def has_ended(self) -> bool:
        """Whether rank 0 has ended without an error. Raises `RankLost` if it is gone or silent."""
        return self._is_set(END_KEY)

    def end(self) -> None:
        """Waits without limit for rank 0, then, in a collective, for every rank. Raises `RankLost`
        if one is gone.
        """
        if self.rank == 0:
            self.store.set(END_KEY, "1")
        while not self.has_ended():
            time.sleep(PAUSE_S)
        with self.collective():  # rank 0's store must live until all ranks have read END_KEY
            dist.barrier(self.writing)  # pyright: ignore[reportUnknownMemberType]

    def report(self, failures: Sequence[TakeFailed]) -> None:
        """Passes the takes on which this rank failed to rank 0 (`recording`), and waits at most
        `REPORT_S` for the record; logs an error without one. Of several failed ranks the first
        report counts.
        """
        try:
            self.store.compare_set(FAILED_KEY, "", msgspec.json.encode(failures).decode())
            give_up = time.monotonic() + REPORT_S
            while not self._is_set(RECORDED_KEY):
                if time.monotonic() > give_up:
                    raise RankLost(f"no answer within {REPORT_S:g} s")
                time.sleep(PAUSE_S)
        except (RuntimeError, RankLost) as error:
            log.error("rank %d: rank 0 did not record the failure: %s", self.rank, error)

    @contextmanager
    def recording(self, record: Callable[[Sequence[TakeFailed]], None]) -> Generator[None]:
        """While the block runs on rank 0, passes takes on which another rank failed to `record`."""
        has_ended = threading.Event()

        def wait() -> None:
            while not self.store.check([FAILED_KEY]):
                if has_ended.wait(PAUSE_S):
                    return
            record(msgspec.json.decode(self.store.get(FAILED_KEY), type=list[TakeFailed]))
            self.store.set(RECORDED_KEY, "1")

        # The main thread may be in a collective with the failed rank, which over NCCL may end only
        # with the process.
        waiting = threading.Thread(target=wait, name="records failures", daemon=True)
        waiting.start()
        try:
            yield
        finally:
            has_ended.set()
            waiting.join()

    def gather(self, value: Any, type_: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """The values of all ranks, in their order, at every rank. A collective, of the default
        group unless `group` is given.
        """
        # No pickle: received data is never executed.
        mine = msgspec.msgpack.encode(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group)  # pyright: ignore[reportUnknownMemberType]
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        received = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(received, padded, group)  # pyright: ignore[reportUnknownMemberType]
        parts = (
            data.numpy().tobytes()[: int(size)] for data, size in zip(received, sizes, strict=True)
        )
        return [msgspec.msgpack.decode(part, type=type_) for part in parts]

    @contextmanager
    def together(self) -> Generator[None]:
        """Raises `CorruptObject` at all ranks if the block raised it or `ObjectMissing` at any. A
        collective of the main threads at the block's end.
        """
        problem = ""
        try:
            yield
        except (CorruptObject, ObjectMissing) as error:
            problem = str(error)
        with self.collective():
            problems = [text for text in self.gather(problem, str) if text]
        if problems:
            raise CorruptObject(problems[0])

    @contextmanager
    def collective(self) -> Generator[None]:
        """If the collective in the block fails, raises `RankLost` with the ranks whose connections
        are closed.
        """
        try:
            yield
        except RollstreamError:
            raise
        except RuntimeError as error:  # collectives raise no more specific type
            gone = self._roll_call()
            if gone:
                what = f"rank {', '.join(map(str, gone))} of the trainer is gone"
            else:
                limit = f"{self.timeout_s:g} s (trainer.ranks_timeout_s)"
                what = f"a rank of the trainer failed or does not answer within {limit}"
            raise RankLost(f"{what}; all ranks end and restart together ({error})") from error

    def _is_set(self, key: str) -> bool:
        answers: SimpleQueue[bool | RuntimeError] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put(self.store.check([key]))
            except RuntimeError as error:
                answers.put(error)

        # The store's client has no timeout for this call (torch 2.13), and rank 0 may hang.
        threading.Thread(target=ask, name="asks rank 0", daemon=True).start()
        try:
            answer = answers.get(timeout=self.timeout_s)
        except Empty:
            limit = f"{self.timeout_s:g} s (trainer.ranks_timeout_s)"
            answer = RuntimeError(f"no answer within {limit}")
        if isinstance(answer, RuntimeError):
            raise RankLost(f"rank {self.rank}: rank 0 is gone or silent ({answer})") from answer
        return answer

    def _roll_call(self) -> list[int]:
        def is_gone(rank: int) -> bool:
            began = time.monotonic()
            try:
                work = dist.isend(torch.zeros(1), rank, group=self.probes)
                if work is not None:
                    work.wait(timedelta(seconds=ROLL_CALL_S))
            except RuntimeError:
                # A probe that times out proves nothing: the rank may be too busy to receive it.
                return time.monotonic() - began < ROLL_CALL_S / 2
            return False

        others = [rank for rank in range(self.size) if rank != self.rank]
        with self._probing, ThreadPoolExecutor(self.size) as pool:
            are_gone = list(pool.map(is_gone, others))
        return [rank for rank, gone in zip(others, are_gone, strict=True) if gone]


@contextmanager
def join_ranks(device: str, timeout_s: float) -> Generator[Ranks]:
    """Waits until all ranks have joined, runs the block, and ends together with the others.
    `device` is `cpu` or `cuda` (the GPU with the rank's number on its machine). Raises `RankLost`
    if a rank does not join in time.
    """
    mine, backend = _device(device)
    timeout = timedelta(seconds=timeout_s)
    try:
        store, size = rendezvous_store(timeout_s), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            backend, timeout=timeout, store=store, rank=rank_of(), world_size=size
        )
        mesh = init_device_mesh(mine.type, (dist.get_world_size(),))
        writing = dist.new_group(backend="gloo", timeout=timeout)  # pyright: ignore[reportUnknownMemberType]
        probes = dist.new_group(backend="gloo", timeout=timeout)  # pyright: ignore[reportUnknownMemberType]
    except RuntimeError as error:
        raise RankLost(f"the trainer's ranks did not all join: {error}") from error
    assert isinstance(writing, dist.ProcessGroup)  # every rank is in it
    assert isinstance(probes, dist.ProcessGroup)
    ranks = Ranks(dist.get_rank(), size, mine, mesh, writing, probes, store, timeout_s)
    log.info("rank %d of %d on %s", ranks.rank, ranks.size, mine)
    try:
        yield ranks
    except SystemExit:  # stopped while it waited for the lease
        ranks.end()
        raise
    ranks.end()
    # Only after a clean end: with a rank gone, destroying the groups would hang.
    dist.destroy_process_group()


def _device(name: str) -> tuple[torch.device, str]:
    if name == "cpu":
        return torch.device("cpu"), "gloo"
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= count:
        raise ConfigurationError(
            f"local rank {local} has no device of its own: PyTorch sees {count} here; start at "
            "most that many processes on this machine (trainer.processes, or torchrun's "
            "--nproc-per-node)"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local), "cpu:gloo,cuda:nccl"
