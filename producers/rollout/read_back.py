"""Reads an engine's tensors back: all of the first version, and a bounded sample after each update.
After a mismatch the rollout generates nothing until all tensors were fetched again (a repair) and
compared.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import WeightComparison, WeightUpdate
from rollstream.storage.weights.mapped import MappedTensors
from rollstream.streams.records import WeightsAnnounced

log = logging.getLogger(__name__)

SAMPLE_BYTES = 32 << 20  # per comparison; a tensor larger than this is a sample of its own
ReadBack = Callable[[Iterable[str], Mapping[str, torch.Tensor]], WeightComparison]


class TensorRotation:
    """`next` continues after the last name of the previous call; the names may change between
    calls.
    """

    def __init__(self, sample_bytes: int = SAMPLE_BYTES) -> None:
        self._bytes = sample_bytes
        self._after = ""

    def next(self, sizes: Mapping[str, int]) -> list[str]:
        """Returns names of at most `sample_bytes` together, but at least one tensor if there is
        any.
        """
        names = sorted(sizes)
        later = [name for name in names if name > self._after]
        sample: list[str] = []
        room = self._bytes
        for name in later + names[: len(names) - len(later)]:
            room -= sizes[name]
            if sample and room < 0:
                break
            sample.append(name)
        self._after = sample[-1] if sample else ""
        return sample


@dataclass(frozen=True, slots=True)
class FetchedWeights:
    """The `update` to one announced version: verified tensors, prepared for the engine. `repairs`:
    they replace tensors that the engine served wrongly.
    """

    announced: WeightsAnnounced
    update: WeightUpdate
    repairs: bool = False


@dataclass(frozen=True, slots=True)
class ReadBackResult:
    """The comparison of the tensors of `fetched` with the engine's, whose update took `seconds`."""

    fetched: FetchedWeights
    compared: WeightComparison
    seconds: float


def compare_tensors(
    fetched: FetchedWeights, read_back: ReadBack, names: list[str] | None, seconds: float
) -> ReadBackResult:
    """Compares tensors. A difference is logged and returned, not raised; a tensor that is damaged
    where the rollout holds it differs too.
    """
    compared = _compared(fetched, read_back, names)
    if compared.differing:
        log.error(
            "version %s: the engine does not serve what it was given (%d of %d tensors: %s); "
            "it serves nothing until all tensors were fetched again",
            fetched.announced.version,
            len(compared.differing),
            compared.count,
            ", ".join(compared.differing[:3]),
        )
    return ReadBackResult(fetched, compared, seconds)


def _compared(
    fetched: FetchedWeights, read_back: ReadBack, names: list[str] | None
) -> WeightComparison:
    tensors = fetched.update.tensors
    names = list(tensors) if names is None else names
    compared = read_back(names, tensors)
    # An engine may read the same damaged bytes; comparing it with them would find nothing.
    damaged = tensors.damaged(names) if isinstance(tensors, MappedTensors) else ()
    differing = dict.fromkeys((*compared.differing, *damaged))
    return WeightComparison(compared.count, tuple(differing))


def compare_all_tensors(
    fetched: FetchedWeights,
    read_back: ReadBack,
    started_s: float,
    timer: Callable[[], float] = time.perf_counter,
) -> ReadBackResult:
    """Raises `EngineRefused` if a tensor differs."""
    compared = _compared(fetched, read_back, None)
    if compared.differing:
        raise EngineRefused(
            f"weights: the engine does not serve {', '.join(compared.differing[:3])} of version "
            f"{fetched.announced.version} as given ({len(compared.differing)} of {compared.count})"
        )
    return ReadBackResult(fetched, compared, timer() - started_s)
