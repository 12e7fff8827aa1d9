"""The trainer as several processes: rank 0 holds the role, the others its model's other slices.

The environment says that there are several (`train_group.py` or `torchrun`); without that there is
one, and nothing here acts (nor is what it needs imported).
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from consumers.trainer.device import device_of
from consumers.trainer.paced_learner import PacedModel
from consumers.trainer.sharded.launch import is_launched
from rollstream.role_place import Place, set_threads
from rollstream.starting import PACED, starting_model
from rollstream.train_group import threads_of_rank
from streams.errors import ConfigurationError

if TYPE_CHECKING:
    from consumers.trainer.sharded.learner import ShardedModel
    from consumers.trainer.sharded.ranks import Ranks
    from consumers.trainer.sharded.telling import Teller


@dataclass(frozen=True, slots=True)
class Party:
    """The ranks; `teller` is rank 0's alone."""

    ranks: "Ranks"
    teller: "Teller | None"

    @property
    def is_led(self) -> bool:
        """Whether this process holds the role; the others follow it."""
        return self.teller is not None

    def share(self, model: PreTrainedModel | PacedModel) -> "ShardedModel":
        """The model as one that all ranks learn; rank 0 asks."""
        from consumers.trainer.sharded.learner import ShardedModel

        assert self.teller is not None
        assert isinstance(model, PreTrainedModel)
        return ShardedModel(model, self.ranks, self.teller)


@contextmanager
def together(place: Place) -> Generator[Party | None]:
    """All ranks are there while the block runs, and the others end with rank 0; None where this is
    the only process.
    """
    if not is_launched():
        yield None
        return
    from consumers.trainer.sharded.ranks import joined
    from consumers.trainer.sharded.telling import Teller

    settings = place.configuration.trainer
    if settings.learner == PACED:
        raise ConfigurationError(
            'trainer.learner = "paced" must run as one process: it has no model to share; '
            "start it without torchrun"
        )
    with joined(device_of(settings.device).type, settings.ranks_timeout_s) as ranks:
        teller = Teller(ranks) if ranks.rank == 0 else None
        try:
            yield Party(ranks, teller)
        except SystemExit:  # stopped while it waited for the lease
            _end(teller)
            raise
        _end(teller)


def follow_rank_0(place: Place, ranks: "Ranks") -> bool:
    """True when rank 0 ended, and was not stopped as this one was."""
    from consumers.trainer.sharded.follower import follow

    c = place.configuration
    set_threads(threads_of_rank(c.trainer))

    def load() -> PreTrainedModel:
        model = starting_model(c, place.folder)
        assert isinstance(model, PreTrainedModel)
        return model

    follow(load, place.store, ranks)
    return not place.stop.is_set()


def _end(teller: "Teller | None") -> None:
    from consumers.trainer.sharded.messages import Close

    if teller is not None:
        teller.close(Close())
