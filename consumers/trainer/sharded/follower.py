"""A rank other than 0: holds its slice of the model and executes rank 0's commands in their order,
until the one that ends the trainer.

It has no role and no lease. Rank 0 alone decides what is trained and when, and whether its own term
is still valid.
"""

import logging
from collections.abc import Callable

from transformers import PreTrainedModel

from consumers.settings import TrainerSettings
from consumers.trainer.sharded.messages import (
    Begin,
    Close,
    Encode,
    Finish,
    Gather,
    Hash,
    Identify,
    Load,
    Round,
    Tick,
    Told,
    WriteDelta,
    WriteShards,
)
from consumers.trainer.sharded.ranks import RankLost, Ranks
from consumers.trainer.sharded.shard import Shard, model_hash
from consumers.trainer.sharded.telling import listen
from consumers.trainer.sharded.writing import Portion, Writing
from storage.objects import ObjectStore
from streams.errors import ConfigurationError, RollstreamError

log = logging.getLogger(__name__)


def follow(load: Callable[[], PreTrainedModel], store: ObjectStore, ranks: Ranks) -> None:
    """Execute rank 0's commands until rank 0 has ended. `RankLost` if a rank is gone;
    `ConfigurationError` if this machine's model differs from the one that rank 0 starts from.
    """
    model = load()
    begin = _begin(ranks)
    if begin is None:
        return
    if model_hash(model) != begin.model_hash:
        raise ConfigurationError(
            f"rank {ranks.rank}: the model that this machine starts from is not rank 0's: give all "
            "machines the same model folder (model.path) or a shared run folder"
        )
    settings = TrainerSettings.model_validate_json(begin.settings)
    portion = Portion()
    writing = Writing(portion, store, ranks)
    shard = Shard(model, settings, ranks)
    while not isinstance(command := listen(ranks), Close):
        try:
            _do(command, shard, portion, writing)
        except RollstreamError:
            raise
        except RuntimeError as error:  # collectives raise no more specific type
            raise RankLost(
                f"rank {ranks.rank}: another rank is gone or failed ({error})"
            ) from error
    writing.close()


def _begin(ranks: Ranks) -> Begin | None:
    """The first command; None if rank 0 ended before it got the lease."""
    while isinstance(command := listen(ranks), Tick):
        log.debug("rank %d waits for rank 0", ranks.rank)
    if isinstance(command, Close):
        return None
    assert isinstance(command, Begin)
    return command


def _do(command: Told, shard: Shard, portion: Portion, writing: Writing) -> None:
    match command:
        case Tick():
            pass
        case Round(version, counts, samples):
            shard.train([one.sample() for one in samples], version, counts)
        case Finish():
            shard.finish()
        case Gather(copy, dtype, alive):
            mine = shard.snapshot(dtype) if dtype else shard.state()
            portion.keep(copy, mine, alive)
        case Load(updates, applied):
            shard.load(None, updates, applied)
        case Hash():
            shard.state_hash()
        case WriteShards() | Encode() | WriteDelta() | Identify():
            writing.enqueue(command)
        case Begin() | Close():
            raise AssertionError(f"{command} comes once")
