"""The trainer as several processes: rank 0 holds the role, the others its model's other slices.

The environment says that there are several (`train_group.py` or `torchrun`); without that there is
one, and nothing here acts (nor is what it needs imported).
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from rollstream.consumers.trainer.learn.device import device_of
from rollstream.consumers.trainer.learn.paced import PacedModel
from rollstream.consumers.trainer.sharded.rank_environment import is_launched
from rollstream.roles.context import RoleContext, set_torch_threads
from rollstream.roles.initial_model import PACED_LEARNER, starting_model
from rollstream.supervisor.train_group import threads_per_rank
from rollstream.errors import ConfigurationError

if TYPE_CHECKING:
    from rollstream.consumers.trainer.sharded.learner import ShardedModel
    from rollstream.consumers.trainer.sharded.ranks import Ranks
    from rollstream.consumers.trainer.sharded.commands import RankCommander


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks; `teller` is rank 0's alone."""

    ranks: "Ranks"
    teller: "RankCommander | None"

    @property
    def is_led(self) -> bool:
        """Whether this process holds the role; the others follow it."""
        return self.teller is not None

    def share(self, model: PreTrainedModel | PacedModel) -> "ShardedModel":
        """The model as one that all ranks learn; rank 0 asks."""
        from rollstream.consumers.trainer.sharded.learner import ShardedModel

        assert self.teller is not None
        assert isinstance(model, PreTrainedModel)
        return ShardedModel(model, self.ranks, self.teller)


@contextmanager
def join_rank_group(place: RoleContext) -> Generator[RankGroup | None]:
    """All ranks are there while the block runs, and the others end with rank 0; None where this is
    the only process.
    """
    if not is_launched():
        yield None
        return
    from rollstream.consumers.trainer.sharded.ranks import join_ranks
    from rollstream.consumers.trainer.sharded.commands import RankCommander

    settings = place.configuration.trainer
    if settings.learner == PACED_LEARNER:
        raise ConfigurationError(
            'trainer.learner = "paced" must run as one process: it has no model to share; '
            "start it without torchrun"
        )
    with join_ranks(device_of(settings.device).type, settings.ranks_timeout_s) as ranks:
        teller = RankCommander(ranks) if ranks.rank == 0 else None
        try:
            yield RankGroup(ranks, teller)
        except SystemExit:  # stopped while it waited for the lease
            _close_ranks(teller)
            raise
        _close_ranks(teller)


def follow_rank_0(place: RoleContext, ranks: "Ranks") -> bool:
    """True when rank 0 ended, and was not stopped as this one was."""
    from rollstream.consumers.trainer.sharded.follower import run_follower

    c = place.configuration
    set_torch_threads(threads_per_rank(c.trainer))

    def load() -> PreTrainedModel:
        model = starting_model(c, place.folder)
        assert isinstance(model, PreTrainedModel)
        return model

    run_follower(load, place.store, ranks)
    return not place.stop.is_set()


def _close_ranks(teller: "RankCommander | None") -> None:
    from rollstream.consumers.trainer.sharded.messages import EndRanks

    if teller is not None:
        teller.close(EndRanks())
