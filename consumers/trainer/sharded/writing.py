"""Writes a version or a checkpoint from all ranks at once: each rank writes the tensors that it
holds, and rank 0 combines the results.

A rank writes in a thread of its own, so that it trains meanwhile. It executes one command after the
other: rank 0 sends the next when all ranks have replied. An exception of a rank is sent as its
reply and raised at rank 0.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TypeVar

from torch import Tensor

from consumers.trainer.sharded.messages import (
    Answer,
    Asked,
    Encode,
    Encoded,
    Failed,
    Identify,
    Identities,
    WriteDelta,
    WriteShards,
    Wrote,
    WroteDelta,
)
from consumers.trainer.sharded.ranks import Ranks
from consumers.trainer.sharded.telling import Teller, answer, answer_of
from storage.manifest import Delta, Manifest, TensorFiles
from storage.objects import ObjectStore
from storage.shards import write_shards
from storage.spread import Spread, SpreadDifferences, identities, merged, merged_delta, merged_files
from storage.versions.differences import (
    STEM,
    Differences,
    Parent,
    encode_version,
    write_delta,
)
from streams.errors import RollstreamError, StoreError

_A = TypeVar("_A", bound=Answer)
log = logging.getLogger(__name__)


def stem_of(stem: str, rank: int) -> str:
    """The file name stem of one rank."""
    return f"{stem}-rank{rank}"


class Portion:
    """A rank's copies by number, and the writing commands on them. `keep` and `execute` may be
    called from two threads.
    """

    def __init__(self) -> None:
        self._copies: dict[int, dict[str, Tensor]] = {}
        self._encoded: tuple[Differences, Manifest] | None = None

    def keep(self, number: int, tensors: dict[str, Tensor], alive: tuple[int, ...]) -> None:
        """Add a copy and drop those that are not in `alive`."""
        kept = {n: t for n, t in self._copies.items() if n in alive}
        self._copies = {**kept, number: tensors}

    def execute(self, command: Asked, store: ObjectStore | None) -> Answer:
        """Execute a command; `store` is needed by those that write."""
        match command:
            case WriteShards(copy, folder, stem, shard_bytes):
                assert store is not None
                return Wrote(write_shards(store, folder, stem, self._copies[copy], shard_bytes))
            case Encode(copy, base, parent):
                before = Parent(parent, self._copies[base])
                found = encode_version(self._copies[copy], before)
                assert isinstance(found, Differences)
                self._encoded = (found, parent)
                return Encoded(found.bytes, found.weights)
            case WriteDelta(folder, stem, shard_bytes):
                assert self._encoded is not None
                assert store is not None
                differences, parent = self._encoded
                self._encoded = None  # as large as a version, and written once
                delta = write_delta(store, folder, differences, parent, shard_bytes, stem)
                return WroteDelta(delta)
            case Identify(copy):
                return Identities(*identities(self._copies[copy]))


class Writing:
    """The writing thread of a rank other than 0."""

    def __init__(self, portion: Portion, store: ObjectStore, ranks: Ranks) -> None:
        self._portion, self._store, self._ranks = portion, store, ranks
        self._commands: SimpleQueue[Asked | None] = SimpleQueue()  # rank 0 waits for each answer
        self._thread = threading.Thread(target=self._run, name="writing", daemon=True)
        self._thread.start()

    def enqueue(self, command: Asked) -> None:
        """Queue a command; returns at once."""
        self._commands.put(command)

    def close(self) -> None:
        """Reply to every queued command, then end the thread."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                reply = self._portion.execute(command, self._store)
            except Exception as error:  # rank 0 raises it; without a reply it would wait in vain
                log.exception("rank %d could not write", self._ranks.rank)
                reply = Failed(f"{type(error).__name__}: {error}")
            answer(reply, self._ranks)


class Copybook:
    """Rank 0's side: numbers the copies, sends writing commands to all ranks at once, and collects
    their replies.
    """

    def __init__(self, teller: Teller, ranks: Ranks) -> None:
        self._teller, self._ranks = teller, ranks
        self._portion = Portion()
        self._lock = threading.Lock()
        self._alive: weakref.WeakValueDictionary[int, Copied] = weakref.WeakValueDictionary()
        self._next = 0

    def next_number(self) -> tuple[int, tuple[int, ...]]:
        """The number of a new copy, and the numbers of the copies that are still referenced at
        rank 0.
        """
        self._next += 1
        return self._next, tuple(self._alive.keys())

    def keep(self, number: int, mine: dict[str, Tensor], alive: tuple[int, ...]) -> "Copied":
        """The handle of a copy gathered at all ranks; the ranks keep their parts while the handle
        is referenced.
        """
        self._portion.keep(number, mine, alive)
        copied = Copied(number, self)
        self._alive[number] = copied
        return copied

    def request(
        self, command_of: Callable[[int], Asked], kind: type[_A], store: ObjectStore | None = None
    ) -> list[_A]:
        """The replies of all ranks, rank 0 first; `StoreError` names a rank that failed."""
        with self._lock:
            self._teller.send(command_of)
            mine: Answer | RollstreamError
            try:
                mine = self._portion.execute(command_of(0), store)
            except RollstreamError as error:  # raised after the other ranks' replies were read
                mine = error
            theirs = [answer_of(rank, self._ranks) for rank in range(1, self._ranks.size)]
        if isinstance(mine, RollstreamError):
            raise mine
        return [_expect(reply, kind, rank) for rank, reply in enumerate((mine, *theirs))]


def _expect(reply: Answer, kind: type[_A], rank: int) -> _A:
    if isinstance(reply, Failed):
        raise StoreError(f"rank {rank} of the trainer could not write: {reply.message}")
    assert isinstance(reply, kind)
    return reply


class Copied(Spread):
    """Copy `number` of the model's tensors, of which every rank holds a part."""

    def __init__(self, number: int, book: Copybook) -> None:
        self.number, self._book = number, book

    def write_shards(
        self, store: ObjectStore, folder: str, stem: str, shard_bytes: int
    ) -> TensorFiles:
        def command_of(rank: int) -> WriteShards:
            return WriteShards(self.number, folder, stem_of(stem, rank), shard_bytes)

        return merged_files(reply.files for reply in self._book.request(command_of, Wrote, store))

    def differences(self, parent: Manifest, base: Spread) -> SpreadDifferences:
        assert isinstance(base, Copied)
        # Encoding needs only the tensors' hashes; the delta's entries would double the message.
        slim = replace(parent, model_files=(), delta=None)
        command = Encode(self.number, base.number, slim)
        return _Encoded(self._book.request(lambda rank: command, Encoded), self._book)

    def identities(self) -> tuple[dict[str, str], dict[str, str]]:
        command = Identify(self.number)
        found = self._book.request(lambda rank: command, Identities)
        return merged(one.hashes for one in found), merged(one.tied for one in found)


class _Encoded(SpreadDifferences):
    def __init__(self, parts: Sequence[Encoded], book: Copybook) -> None:
        self.weights = merged_files(part.weights for part in parts)
        self.bytes = sum(part.bytes for part in parts)
        self._book = book

    def write(self, store: ObjectStore, folder: str, parent: Manifest, shard_bytes: int) -> Delta:
        def command_of(rank: int) -> WriteDelta:
            return WriteDelta(folder, stem_of(STEM, rank), shard_bytes)

        found = self._book.request(command_of, WroteDelta, store)
        return merged_delta((reply.delta for reply in found), parent)
