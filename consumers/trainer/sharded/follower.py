"""A rank that is not 0: it holds its slice of the model and does what rank 0 says, in that order,
until it says that the trainer has ended.

It has no role, no lease and no opinion: what is trained, when, and whether rank 0 still may, is
decided there.
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
    """Until rank 0 has ended. `RankLost` when it, or another rank, is gone; `ConfigurationError`
    when this machine's model is not the one that rank 0 starts from.
    """
    model = load()
    begin = _begin(ranks)
    if begin is None:
        return
    if model_hash(model) != begin.model_hash:
        raise ConfigurationError(
            f"rank {ranks.rank}: the model that this machine starts from is not rank 0's: give all "
            "machines the same model folder (model.path) or a run folder that they share"
        )
    settings = TrainerSettings.model_validate_json(begin.settings)
    portion = Portion()
    writing = Writing(portion, store, ranks)
    shard = Shard(model, settings, ranks)
    while not isinstance(told := listen(ranks), Close):
        try:
            _do(told, shard, portion, writing)
        except RollstreamError:
            raise
        except RuntimeError as error:  # what a collective raises has no type of its own
            raise RankLost(
                f"rank {ranks.rank}: another rank is gone or failed ({error})"
            ) from error
    writing.close()


def _begin(ranks: Ranks) -> Begin | None:
    """What to begin with; None when rank 0 ended before (it stood by for the lease)."""
    while isinstance(told := listen(ranks), Tick):
        log.debug("rank %d waits for rank 0", ranks.rank)
    if isinstance(told, Close):
        return None
    assert isinstance(told, Begin)
    return told


def _do(told: Told, shard: Shard, portion: Portion, writing: Writing) -> None:
    match told:
        case Tick():
            pass
        case Round(version, counts, samples):
            shard.train([one.sample() for one in samples], version, counts)
        case Finish():
            shard.finish()
        case Gather(copy, dtype, alive):
            mine = shard.snapshot(dtype) if dtype else shard.state()
            portion.keep(copy, mine, alive)
        case Load(updates, moved):
            shard.load(None, updates, moved)
        case Hash():
            shard.state_hash()
        case WriteShards() | Encode() | WriteDelta() | Identify():
            writing.ask(told)
        case Begin() | Close():
            raise AssertionError(f"{told} comes once")
