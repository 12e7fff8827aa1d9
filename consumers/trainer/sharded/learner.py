"""Trains a model that several processes (ranks) share: each rank has a `ShardedLearner` with a part
of the model (`Shard`), and all ranks together execute each operation.

Every rank submits the same micro-batches, those that the takes in the ledger name. As soon as there
is one for each rank they form a round: each rank trains its own. The rest at the end of an update
forms a last round, in which ranks without work train a micro-batch again at weight zero
(`rank_plan.py`). Micro-batches without a trained token are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.poisoned_takes import ComputeFailed
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.workers import BufferPool, is_out_of_memory
from rollstream.consumers.trainer.sharded.rank_plan import rounds
from rollstream.consumers.trainer.sharded.rank_writing import RankTensors
from rollstream.consumers.trainer.sharded.ranks import RankLost, Ranks
from rollstream.consumers.trainer.sharded.shard import Shard
from rollstream.consumers.trainer.sharded.starting_model import StartingModel
from rollstream.storage.weights.adapters import AdapterTensors
from rollstream.storage.weights.shards import StoredTensors


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """Holds the model that a run starts from, and this rank's connection to the ranks that share
    it.
    """

    start: StartingModel
    ranks: Ranks


class ShardedLearner:
    """Implements `Learner` (`learn/base.py`) on every rank. All ranks must call its methods in the
    same order, each from one thread. Methods that train or gather raise `RankLost` if another rank
    is gone. Repeated on the same number of ranks, results are bit-identical; another number rounds
    differently.
    """

    def __init__(self, sharded: ShardedModel, settings: TrainerSettings) -> None:
        self._settings, self._ranks = settings, sharded.ranks
        self._waiting: list[Sequence[Sample]] = []  # micro-batches of the next round
        self._numbers: list[int] = []
        """Numbers within the step of the micro-batches in `_waiting`."""
        self._begins_step = True
        self.micro_batches = 0
        """Number of micro-batches submitted in the step being trained, or just trained."""
        with self._ranks.collective():
            self._shard = Shard(sharded.start, settings, sharded.ranks)

    @property
    def updates(self) -> int:
        """Number of updates behind the fp32 master weights, skipped updates included."""
        return self._shard.updates

    @property
    def version(self) -> int:
        """Number of the version that the current step trains from."""
        return self.updates // self._settings.updates_per_step

    @property
    def busy_s(self) -> float:
        """Seconds of this rank's passes, including its waits for other ranks within them."""
        return self._shard.busy_s

    @property
    def state_bytes(self) -> int:
        """Bytes of the master weights and the optimiser's moments, of all ranks together."""
        return self._shard.state_bytes

    def submit(self, samples: Sequence[Sample]) -> None:
        """Submit one micro-batch of the update, and train a round once there is one for each rank.
        Raises `ComputeFailed`, with the numbers of the round's micro-batches, if computing fails.
        """
        if self._begins_step:
            self.micro_batches, self._begins_step = 0, False
        self.micro_batches += 1
        if not any(sample.mask.any() for sample in samples):
            self._shard.note_masked(sum(len(sample.mask) for sample in samples))
            return
        self._waiting.append(samples)
        self._numbers.append(self.micro_batches - 1)
        if len(self._waiting) == self._ranks.size:
            self._round()

    def settle(self) -> None:
        """Returns at once: `submit` trains full rounds itself, and the rest waits for
        `finish_update`.
        """

    def finish_update(self) -> dict[str, float]:
        """Train the remaining micro-batches, change the weights, and return the update's metrics.
        Raises as `submit` does.
        """
        busy_s = self.busy_s
        if self._waiting:
            self._round()
        with self._ranks.collective():
            metrics = self._shard.finish()
        self._begins_step = self.updates % self._settings.updates_per_step == 0
        return {**metrics, "busy_s": self.busy_s - busy_s}

    def snapshot(self, dtype: str, pool: BufferPool | None = None) -> RankTensors | AdapterTensors:
        """Return a copy of the weights to publish: of a whole model this rank's share of the
        tensors, of an adapter all of it. The copy is in new memory: `pool` is not used.
        """
        with self._ranks.collective():
            return self._shard.snapshot(dtype)

    def state(self, pool: BufferPool | None = None) -> RankTensors:
        """Return this rank's rows of all tensors that the next update depends on: a copy, or the
        state itself if `lends_state`. `pool` is not used.
        """
        return RankTensors(self._shard.state(), self._ranks)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a state that any number of ranks, or an unsharded learner, has saved; each rank
        reads its rows. Raises `ConfigurationError` if the state is of another model, and
        `CorruptObject` at all ranks if any of them finds damage.
        """
        assert isinstance(tensors, StoredTensors), "ranks read their rows from the store"
        self._shard.check(tensors)
        self._shard.load(tensors)

    @property
    def lends_state(self) -> bool:
        """Whether `state` returns the state itself: it must be written before the next update."""
        return self._shard.lends_state

    def state_hash(self) -> str:
        """Return one xxh3-128 hash of the master weights and optimiser states of all ranks. Another
        number of ranks gives another hash for the same state.
        """
        with self._ranks.collective():
            return self._shard.state_hash()

    def close(self) -> None:
        """Does nothing: the ranks end together (`Ranks.end`)."""

    def _round(self) -> None:
        """Train the waiting micro-batches, at most one for each rank."""
        (turns,) = rounds(len(self._waiting), self._ranks.size)
        mine, version, waiting = turns[self._ranks.rank], self.version, self._waiting
        self._waiting = []
        numbers = tuple(self._numbers[: len(waiting)])
        del self._numbers[: len(waiting)]
        try:
            with self._ranks.collective():
                self._shard.train(waiting[mine.micro_batch], version, mine.counts)
        except RankLost as lost:  # no evidence against these samples, unless memory ran out
            if is_out_of_memory(lost.__cause__):
                raise ComputeFailed(numbers, lost.__cause__ or lost) from lost.__cause__
            raise
        except Exception as error:
            raise ComputeFailed(numbers, error) from error
