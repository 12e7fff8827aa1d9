"""Trains a model that ranks share. Every rank submits the same micro-batches: one for each rank
form a round, the rest of an update a last one (`rank_plan.py`). Micro-batches without a trained
token are left out.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.poisoned_takes import ComputeFailed
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.base import LearnableModel
from rollstream.consumers.trainer.learn.objective import check_over_ranks
from rollstream.consumers.trainer.learn.statistics import LossStatistics
from rollstream.consumers.trainer.learn.workers import BufferPool, is_out_of_memory
from rollstream.consumers.trainer.rank_plan import (
    RankTurn,
    divide,
    parts_of_round,
    rounds,
)
from rollstream.consumers.trainer.sharded.rank_writing import RankTensors
from rollstream.consumers.trainer.sharded.ranks import RankLost, Ranks
from rollstream.consumers.trainer.sharded.shard import Shard
from rollstream.consumers.trainer.sharded.starting_model import StartingModel
from rollstream.errors import ConfigurationError
from rollstream.storage.weights.adapters import AdapterTensors
from rollstream.storage.weights.shards import StoredTensors

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardedModel(LearnableModel):
    start: StartingModel
    ranks: Ranks

    def open_learner(self, settings: TrainerSettings) -> "ShardedLearner":
        return ShardedLearner(self, settings)


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    samples: Sequence[Sample]
    number: int
    shortages: int
    """Lacks of memory on it in earlier terms."""

    @property
    def trained(self) -> int:
        """Number of samples with a trained token, at least one."""
        return sum(bool(sample.mask.any()) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class _Pass:
    """With `counts` False its gradients are zero."""

    samples: Sequence[Sample]
    counts: bool


def split_samples(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """Returns parts as `divide` cuts the samples with a trained token. Each has such a sample or is
    empty; the first has all others.
    """
    trained = [sample for sample in samples if sample.mask.any()]
    split = [trained[start:end] for start, end in divide(len(trained), parts)]
    split[0] += [sample for sample in samples if not sample.mask.any()]
    return split


class ShardedLearner:
    """All ranks must call its methods in the same order, from one thread each. Methods that train
    or gather raise `RankLost` if another rank is gone. Results are bit-identical for one number of
    ranks.
    """

    def __init__(self, sharded: ShardedModel, settings: TrainerSettings) -> None:
        check_over_ranks(settings)
        if settings.epochs > 1 or settings.optimiser != "adamw":
            raise ConfigurationError(
                "trainer.epochs must be 1 and trainer.optimiser 'adamw' where several processes "
                "train one model; train with one process"
            )
        self._settings, self._ranks = settings, sharded.ranks
        self._waiting: list[_MicroBatch] = []  # those of the next round
        self._begins_step = True
        self.micro_batches = 0
        with self._ranks.collective():
            self._shard = Shard(sharded.start, settings, sharded.ranks)

    @property
    def updates(self) -> int:
        return self._shard.updates

    @property
    def version(self) -> int:
        return self.updates // self._settings.updates_in_step

    @property
    def busy_s(self) -> float:
        """Waits for other ranks included."""
        return self._shard.busy_s

    @property
    def state_bytes(self) -> int:
        return self._shard.state_bytes

    def submit(self, samples: Sequence[Sample], shortages: int = 0) -> None:
        """Trains a round once there is a micro-batch for each rank. Every rank passes the same
        `shortages`, those in the ledger before the term. Raises `ComputeFailed` with the numbers of
        the round's micro-batches.
        """
        if self._begins_step:
            self.micro_batches, self._begins_step = 0, False
            self._shard.begin_step(self.version)
        self.micro_batches += 1
        if not any(sample.mask.any() for sample in samples):
            if self._ranks.rank == 0:  # each token counts once
                masked = sum(len(sample.mask) for sample in samples)
                self._shard.add_statistics(LossStatistics(masked=float(masked)))
            return
        self._waiting.append(_MicroBatch(samples, self.micro_batches - 1, shortages))
        if len(self._waiting) == self._ranks.size:
            self._round()

    def settle(self) -> None:
        """Returns at once: full rounds are trained, the rest waits for `finish_update`."""

    def finish_update(self) -> dict[str, float]:
        """Raises as `submit`."""
        busy_s = self.busy_s
        if self._begins_step:
            self._shard.begin_step(self.version)
        if self._waiting:
            self._round()
        with self._ranks.collective():
            metrics = self._shard.finish()
        self._begins_step = self.updates % self._settings.updates_in_step == 0
        return {**metrics, "busy_s": self.busy_s - busy_s}

    def snapshot(self, dtype: str, pool: BufferPool | None = None) -> RankTensors | AdapterTensors:
        """Returns the snapshot in new memory: this rank's share of a whole model, or all of an
        adapter.
        """
        with self._ranks.collective():
            return self._shard.snapshot(dtype)

    def state(self, pool: BufferPool | None = None) -> RankTensors:
        """Returns this rank's rows: a copy, or the state itself if `lends_state`."""
        return RankTensors(self._shard.state(), self._ranks)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads the state of any number of ranks, or of an unsharded learner. Raises
        `ConfigurationError` for another model's state, and `CorruptObject` at all ranks if any
        finds damage.
        """
        assert isinstance(tensors, StoredTensors), "ranks read their rows from the store"
        self._shard.check(tensors)
        self._shard.load(tensors)

    @property
    def lends_state(self) -> bool:
        return self._shard.lends_state

    def state_hash(self) -> str:
        with self._ranks.collective():
            return self._shard.state_hash()

    def close(self) -> None:
        """Does nothing: the ranks end together (`Ranks.end`)."""

    def _round(self) -> None:
        (turns,) = rounds(len(self._waiting), self._ranks.size)
        version, waiting, self._waiting = self.version, self._waiting, []
        numbers = tuple(batch.number for batch in waiting)
        try:
            with self._ranks.collective():
                for rank_pass in self._passes(waiting, turns[self._ranks.rank]):
                    self._shard.train(rank_pass.samples, version, rank_pass.counts)
        except RankLost as lost:  # no evidence against these samples, unless memory ran out
            if is_out_of_memory(lost.__cause__):
                raise ComputeFailed(numbers, lost.__cause__ or lost) from lost.__cause__
            raise
        except Exception as error:
            raise ComputeFailed(numbers, error) from error

    def _passes(self, waiting: Sequence[_MicroBatch], mine: RankTurn) -> list[_Pass]:
        # A rank cannot halve a micro-batch at once as one process does: say memory runs out on rank
        # 1 in layer 3, while rank 0 waits in the collective of layer 3. The first half would enter
        # that of layer 1, so the two would add different tensors or wait until the timeout.
        # Therefore all ranks end, rank 0 records the failure, and all read its record before the
        # next term's collectives: all divide the round alike, and a repeated take has the same
        # bits. A record that a replaced rank 0 appends later is void (invariant 7).
        micro_batch = waiting[mine.micro_batch]
        shortages = max(batch.shortages for batch in waiting)
        parts = parts_of_round([batch.trained for batch in waiting], shortages)
        if parts == 1:
            return [_Pass(micro_batch.samples, mine.counts)]
        split = split_samples(micro_batch.samples, parts)
        if mine.counts:
            count, halved = len(micro_batch.samples), sum(map(bool, split)) - 1
            log.warning("memory ran out on %d samples: trained in %d parts", count, halved + 1)
            self._shard.add_statistics(LossStatistics(halved=float(halved)))
        # A rank with fewer parts trains a sample again at weight zero.
        return [_Pass(part or split[0][:1], mine.counts and bool(part)) for part in split]
