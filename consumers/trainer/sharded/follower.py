"""A rank other than 0: holds its slice of the model and executes rank 0's commands in their order,
until the one that ends the trainer.

It has no role and no lease. Rank 0 alone decides which takes are trained and when, and whether its
own term is still valid.
"""

import logging
from collections.abc import Callable
from contextlib import suppress

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.sharded.commands import receive_command
from rollstream.consumers.trainer.sharded.messages import (
    BeginTraining,
    EncodeDelta,
    EndRanks,
    FinishUpdate,
    GatherCopy,
    HashState,
    IdentifyTensors,
    LoadState,
    RankCommand,
    Tick,
    TrainRound,
    WriteDelta,
    WriteShards,
)
from rollstream.consumers.trainer.sharded.rank_writing import RankCopies, RankWriter
from rollstream.consumers.trainer.sharded.ranks import RankLost, Ranks
from rollstream.consumers.trainer.sharded.shard import Shard, StartingModel, model_hash
from rollstream.errors import ConfigurationError, CorruptObject, RollstreamError
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.shards import StoredTensors

log = logging.getLogger(__name__)


def run_follower(load: Callable[[], StartingModel], store: ObjectStore, ranks: Ranks) -> None:
    """Execute rank 0's commands until rank 0 has ended. `RankLost` if a rank is gone;
    `ConfigurationError` if this machine's model differs from the one that rank 0 starts from.
    """
    start = load()
    begin = _receive_begin(ranks)
    if begin is None:
        return
    if model_hash(start) != begin.model_hash:
        raise ConfigurationError(
            f"rank {ranks.rank}: the model that this machine starts from is not rank 0's: give all "
            "machines the same model folder (model.path) or a shared run folder"
        )
    settings = TrainerSettings.model_validate_json(begin.settings)
    rank_copies = RankCopies()
    writer = RankWriter(rank_copies, store, ranks)
    shard = Shard(start, settings, ranks)
    while not isinstance(command := receive_command(ranks), EndRanks):
        try:
            _execute(command, shard, store, rank_copies, writer)
        except RollstreamError:
            raise
        except RuntimeError as error:  # collectives raise no more specific type
            raise RankLost(
                f"rank {ranks.rank}: another rank is gone or failed ({error})"
            ) from error
    writer.close()


def _receive_begin(ranks: Ranks) -> BeginTraining | None:
    """The first command; None if rank 0 ended before it got the lease."""
    while isinstance(command := receive_command(ranks), Tick):
        log.debug("rank %d waits for rank 0", ranks.rank)
    if isinstance(command, EndRanks):
        return None
    assert isinstance(command, BeginTraining)
    return command


def _execute(
    command: RankCommand,
    shard: Shard,
    store: ObjectStore,
    rank_copies: RankCopies,
    writer: RankWriter,
) -> None:
    match command:
        case Tick():
            pass
        case TrainRound(version, counts, samples):
            shard.train([one.sample() for one in samples], version, counts)
        case FinishUpdate():
            shard.finish()
        case GatherCopy(copy, dtype, alive):
            mine = shard.snapshot(dtype) if dtype else shard.state()
            rank_copies.keep(copy, mine, alive)
        case LoadState(folder, files):
            with suppress(CorruptObject):  # all ranks raise it; rank 0 tries another checkpoint
                shard.load(StoredTensors(store, folder, files))
        case HashState():
            shard.state_hash()
        case WriteShards() | EncodeDelta() | WriteDelta() | IdentifyTensors():
            writer.enqueue(command)
        case BeginTraining() | EndRanks():
            raise AssertionError(f"{command} comes once")
