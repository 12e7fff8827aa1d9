"""Rank 0's learner: each of its operations is executed by all ranks together.

Only micro-batches that a `Take` in the ledger names are submitted, so all ranks follow the ledger.
A round is trained when there is a micro-batch for each rank; the rest at the end of an update forms
a last round that is filled up (`rank_plan.py`). Micro-batches without a trained token are not part
of any round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.data.poisoned_takes import ComputeFailed
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.workers import BufferPool, is_out_of_memory
from rollstream.consumers.trainer.sharded.commands import RankCommander
from rollstream.consumers.trainer.sharded.messages import (
    BeginTraining,
    EndRanks,
    FinishUpdate,
    GatherCopy,
    HashState,
    LoadState,
    TrainRound,
    wire_sample,
)
from rollstream.consumers.trainer.sharded.rank_plan import rounds
from rollstream.consumers.trainer.sharded.rank_writing import ShardedCopies, ShardedCopy
from rollstream.consumers.trainer.sharded.ranks import RankLost, Ranks
from rollstream.consumers.trainer.sharded.shard import Shard, StartingModel, model_hash
from rollstream.storage.weights.shards import StoredTensors


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A model and the ranks that share it; `commander` is rank 0's command sender."""

    start: StartingModel
    ranks: Ranks
    commander: RankCommander


class ShardedLearner:
    """Implements `Learner` on rank 0; to be called from one thread. Results are
    bit-identical for the same number of ranks; another number rounds differently.
    """

    def __init__(self, sharded: ShardedModel, settings: TrainerSettings) -> None:
        self._settings, self._ranks, self._commander = settings, sharded.ranks, sharded.commander
        self._waiting: list[Sequence[Sample]] = []
        self._numbers: list[int] = []
        """Numbers within the step of the micro-batches in `_waiting`."""
        self._begins_step = True
        self.micro_batches = 0
        """Micro-batches of the step being trained, or just trained."""
        begin = BeginTraining(model_hash(sharded.start), settings.model_dump_json().encode())
        with self._commander.command(lambda rank: begin):
            self._shard = Shard(sharded.start, settings, sharded.ranks)
        self._copies = ShardedCopies(self._commander, sharded.ranks)

    @property
    def updates(self) -> int:
        """Updates behind the masters, skipped ones included."""
        return self._shard.updates

    @property
    def version(self) -> int:
        """Number of the version that is trained from."""
        return self.updates // self._settings.updates_per_step

    @property
    def busy_s(self) -> float:
        """Seconds of rank 0's passes, including its waits for other ranks within them."""
        return self._shard.busy_s

    @property
    def state_bytes(self) -> int:
        """Bytes of masters and moments, of all ranks together."""
        return self._shard.state_bytes

    def submit(self, samples: Sequence[Sample]) -> None:
        """Submit one micro-batch of the update; trains a round once every rank has one."""
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
        """Train the remaining micro-batches, then change the weights; returns the update's
        metrics.
        """
        busy_s = self.busy_s
        if self._waiting:
            self._round()
        with self._commander.command(lambda rank: FinishUpdate()):
            metrics = self._shard.finish()
        self._begins_step = self.updates % self._settings.updates_per_step == 0
        return {**metrics, "busy_s": self.busy_s - busy_s}

    def snapshot(self, dtype: str, pool: BufferPool | None = None) -> ShardedCopy:
        """A copy of the weights to publish, distributed over the ranks; its memory is its own, not
        from `pool`.
        """
        return self._copy(dtype, lambda: self._shard.snapshot(dtype))

    def state(self, pool: BufferPool | None = None) -> ShardedCopy:
        """Everything that the next update depends on, each rank's rows of it at that rank: a copy,
        or the state itself where `lends_state`.
        """
        return self._copy("", self._shard.state)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a state that any number of ranks, or an unsharded learner, has saved: each rank
        reads its rows. `ConfigurationError` if it is of another model.
        """
        assert isinstance(tensors, StoredTensors), "ranks read their rows from the store"
        self._shard.check(tensors)
        with self._commander.command(lambda rank: LoadState(tensors.folder, tensors.files)):
            self._shard.load(tensors)

    @property
    def lends_state(self) -> bool:
        return self._shard.lends_state

    def state_hash(self) -> str:
        """xxh3-128 of masters and optimiser state. For the same bits it differs with the number of
        ranks.
        """
        with self._commander.command(lambda rank: HashState()):
            return self._shard.state_hash()

    def close(self) -> None:
        """End the other ranks."""
        self._commander.close(EndRanks())

    def _round(self) -> None:
        (turns,) = rounds(len(self._waiting), self._ranks.size)
        version, waiting = self.version, self._waiting
        self._waiting = []

        def command_of(rank: int) -> TrainRound:
            turn = turns[rank]
            samples = tuple(wire_sample(sample) for sample in waiting[turn.micro_batch])
            return TrainRound(version, turn.counts, samples)

        numbers = tuple(self._numbers[: len(waiting)])
        del self._numbers[: len(waiting)]
        try:
            with self._commander.command(command_of):
                self._shard.train(waiting[turns[0].micro_batch], version, turns[0].counts)
        except RankLost as lost:  # another rank may be gone: no evidence against these samples
            if is_out_of_memory(lost.__cause__):
                raise ComputeFailed(numbers, lost.__cause__ or lost) from lost.__cause__
            raise
        except Exception as error:
            raise ComputeFailed(numbers, error) from error

    def _copy(self, dtype: str, gather: Callable[[], dict[str, Tensor]]) -> ShardedCopy:
        number, alive = self._copies.next_number()
        with self._commander.command(lambda rank: GatherCopy(number, dtype, alive)):
            mine = gather()
        return self._copies.keep(number, mine, alive)
