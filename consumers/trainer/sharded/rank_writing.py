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

from rollstream.consumers.trainer.sharded.commands import RankCommander, receive_reply, send_reply
from rollstream.consumers.trainer.sharded.messages import (
    EncodedDelta,
    EncodeDelta,
    IdentifyTensors,
    TensorIdentities,
    WriteCommand,
    WriteDelta,
    WriteFailed,
    WriteReply,
    WriteShards,
    WroteDelta,
    WroteShards,
)
from rollstream.consumers.trainer.sharded.ranks import Ranks
from rollstream.errors import RollstreamError, StoreError
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.manifest import Delta, Manifest, TensorFiles
from rollstream.storage.weights.publish import (
    DELTA_STEM,
    EncodedDifferences,
    ParentVersion,
    encode_version,
    write_delta,
)
from rollstream.storage.weights.shards import write_shards
from rollstream.storage.weights.tensors import (
    DistributedDifferences,
    DistributedTensors,
    merge_delta,
    merge_disjoint,
    merge_files,
    tensor_hashes,
)

log = logging.getLogger(__name__)

_A = TypeVar("_A", bound=WriteReply)


def rank_stem(stem: str, rank: int) -> str:
    """The file name stem of one rank."""
    return f"{stem}-rank{rank}"


class RankCopies:
    """A rank's copies by number, and the writing commands on them. `keep` and `execute` may be
    called from two threads.
    """

    def __init__(self) -> None:
        self._copies: dict[int, dict[str, Tensor]] = {}
        self._encoded: tuple[EncodedDifferences, Manifest] | None = None

    def keep(self, number: int, tensors: dict[str, Tensor], alive: tuple[int, ...]) -> None:
        """Add a copy and drop those that are not in `alive`."""
        kept = {n: t for n, t in self._copies.items() if n in alive}
        self._copies = {**kept, number: tensors}

    def execute(self, command: WriteCommand, store: ObjectStore | None) -> WriteReply:
        """Execute a command; `store` is needed by those that write."""
        match command:
            case WriteShards(copy, folder, stem, shard_bytes):
                assert store is not None
                return WroteShards(
                    write_shards(store, folder, stem, self._copies[copy], shard_bytes)
                )
            case EncodeDelta(copy, base, parent):
                before = ParentVersion(parent, self._copies[base])
                found = encode_version(self._copies[copy], before)
                assert isinstance(found, EncodedDifferences)
                self._encoded = (found, parent)
                return EncodedDelta(found.bytes, found.weights)
            case WriteDelta(folder, stem, shard_bytes):
                assert self._encoded is not None
                assert store is not None
                differences, parent = self._encoded
                self._encoded = None  # as large as a version, and written once
                delta = write_delta(store, folder, differences, parent, shard_bytes, stem)
                return WroteDelta(delta)
            case IdentifyTensors(copy):
                return TensorIdentities(*tensor_hashes(self._copies[copy]))


class RankWriter:
    """The writing thread of a rank other than 0."""

    def __init__(self, rank_copies: RankCopies, store: ObjectStore, ranks: Ranks) -> None:
        self._rank_copies, self._store, self._ranks = rank_copies, store, ranks
        self._commands: SimpleQueue[WriteCommand | None] = (
            SimpleQueue()
        )  # rank 0 waits for each answer
        self._thread = threading.Thread(target=self._run, name="writing", daemon=True)
        self._thread.start()

    def enqueue(self, command: WriteCommand) -> None:
        """Queue a command; returns at once."""
        self._commands.put(command)

    def close(self) -> None:
        """Reply to every queued command, then end the thread."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                reply = self._rank_copies.execute(command, self._store)
            except Exception as error:  # rank 0 raises it; without a reply it would wait in vain
                log.exception("rank %d could not write", self._ranks.rank)
                reply = WriteFailed(f"{type(error).__name__}: {error}")
            send_reply(reply, self._ranks)


class ShardedCopies:
    """Rank 0's side: numbers the copies, sends writing commands to all ranks at once, and collects
    their replies.
    """

    def __init__(self, commander: RankCommander, ranks: Ranks) -> None:
        self._commander, self._ranks = commander, ranks
        self._rank_copies = RankCopies()
        self._lock = threading.Lock()
        self._alive: weakref.WeakValueDictionary[int, ShardedCopy] = weakref.WeakValueDictionary()
        self._next = 0

    def next_number(self) -> tuple[int, tuple[int, ...]]:
        """The number of a new copy, and the numbers of the copies that are still referenced at
        rank 0.
        """
        self._next += 1
        return self._next, tuple(self._alive.keys())

    def keep(self, number: int, mine: dict[str, Tensor], alive: tuple[int, ...]) -> "ShardedCopy":
        """The handle of a copy gathered at all ranks; the ranks keep their parts while the handle
        is referenced.
        """
        self._rank_copies.keep(number, mine, alive)
        copied = ShardedCopy(number, self)
        self._alive[number] = copied
        return copied

    def request(
        self,
        command_of: Callable[[int], WriteCommand],
        kind: type[_A],
        store: ObjectStore | None = None,
    ) -> list[_A]:
        """The replies of all ranks, rank 0 first; `StoreError` names a rank that failed."""
        with self._lock:
            self._commander.send(command_of)
            mine: WriteReply | RollstreamError
            try:
                mine = self._rank_copies.execute(command_of(0), store)
            except RollstreamError as error:  # raised after the other ranks' replies were read
                mine = error
            theirs = [receive_reply(rank, self._ranks) for rank in range(1, self._ranks.size)]
        if isinstance(mine, RollstreamError):
            raise mine
        return [_expect(reply, kind, rank) for rank, reply in enumerate((mine, *theirs))]


def _expect(reply: WriteReply, kind: type[_A], rank: int) -> _A:
    if isinstance(reply, WriteFailed):
        raise StoreError(f"rank {rank} of the trainer could not write: {reply.message}")
    assert isinstance(reply, kind)
    return reply


class ShardedCopy(DistributedTensors):
    """Copy `number` of the model's tensors, of which every rank holds a part."""

    def __init__(self, number: int, copies: ShardedCopies) -> None:
        self.number, self._copies = number, copies

    def write_shards(
        self, store: ObjectStore, folder: str, stem: str, shard_bytes: int
    ) -> TensorFiles:
        def command_of(rank: int) -> WriteShards:
            return WriteShards(self.number, folder, rank_stem(stem, rank), shard_bytes)

        return merge_files(
            reply.files for reply in self._copies.request(command_of, WroteShards, store)
        )

    def differences(self, parent: Manifest, base: DistributedTensors) -> DistributedDifferences:
        assert isinstance(base, ShardedCopy)
        # Encoding needs only the tensors' hashes; the delta's entries would double the message.
        slim = replace(parent, model_files=(), delta=None)
        command = EncodeDelta(self.number, base.number, slim)
        return _ShardedDifferences(
            self._copies.request(lambda rank: command, EncodedDelta), self._copies
        )

    def identities(self) -> tuple[dict[str, str], dict[str, str]]:
        command = IdentifyTensors(self.number)
        found = self._copies.request(lambda rank: command, TensorIdentities)
        return merge_disjoint(one.hashes for one in found), merge_disjoint(
            one.tied for one in found
        )


class _ShardedDifferences(DistributedDifferences):
    def __init__(self, parts: Sequence[EncodedDelta], copies: ShardedCopies) -> None:
        self.weights = merge_files(part.weights for part in parts)
        self.bytes = sum(part.bytes for part in parts)
        self._copies = copies

    def write(self, store: ObjectStore, folder: str, parent: Manifest, shard_bytes: int) -> Delta:
        def command_of(rank: int) -> WriteDelta:
            return WriteDelta(folder, rank_stem(DELTA_STEM, rank), shard_bytes)

        found = self._copies.request(command_of, WroteDelta, store)
        return merge_delta((reply.delta for reply in found), parent)
