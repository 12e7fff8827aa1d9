"""Hand-over as the rollout's side of vLLM sees it: what is offered when a trajectory leaves, and
what is looked for when one comes.

The KV itself is read and written in the process of vLLM's core (`connector.py`), which is told here
what to write about it, and which file is meant. What cannot be had is computed anew, and said at
debug level only.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from weakref import finalize

from producers.engines.base import UpdateMode
from producers.engines.vllm_engine.core import Core
from producers.engines.vllm_engine.exchange import EngineCore
from producers.engines.vllm_engine.handover.file import Front, read_front
from producers.engines.vllm_engine.handover.place import Place
from producers.engines.vllm_engine.handover.rules import blocks_of_use, may_use
from producers.engines.vllm_engine.handover.shelf import BYTES_MAX, Shelf
from producers.engines.vllm_engine.sequence import Sequence
from streams.errors import EngineRefused
from streams.records import Version

log = logging.getLogger(__name__)

WAIT_S = 10.0
"""For KV to be written; it takes a decode step and a copy. What comes later is a file all the same.
"""


class Handover:
    """One engine's part in the folder of its run and node; `StoreError` where that cannot be had.
    `bytes_max` bounds what lies there.
    """

    def __init__(
        self, core: Core, run: str, folder: Path, mode: UpdateMode, bytes_max: int = BYTES_MAX
    ) -> None:
        self._core, self._run = core, run
        self._mode: UpdateMode = mode
        self._shelf = Shelf(folder, bytes_max)
        place = Place(folder)
        self.leave = finalize(self, place.leave)
        self.is_in_doubt = False
        """What is served was found to be other weights than those of its version."""

    def offer(self, sequence: Sequence) -> None:
        """What vLLM has computed of it, before it is forgotten there."""
        if self.is_in_doubt or not sequence.stay:
            return
        about = {
            "folder": str(self._shelf.folder),
            "bytes_max": self._shelf.bytes_max,
            "run": self._run,
            "trajectory": sequence.request.trajectory,
            "versions": [(version.number, version.term) for version in sequence.cached],
        }
        self._core.ask(WAIT_S, "hand_out", sequence.key, about)

    def take(self, sequence: Sequence, version: Version) -> Mapping[str, str] | None:
        """For one that comes to an engine that serves `version`: how the connector finds its KV."""
        front = self._front_of(sequence, version)
        sequence.draw_on(version, frozenset() if front is None else front.versions)
        if front is None:
            return None
        path = self._shelf.path(sequence.request.trajectory)
        return {"path": str(path), "identity": front.identity}

    def update(self, sequences: Iterable[Sequence], version: Version, mode: UpdateMode) -> None:
        """The engine serves `version` from here on, to these too."""
        doubted = False
        for sequence in sequences:
            if mode == "in_flight_recompute":
                sequence.cached, sequence.is_mixed = set(), False
            else:
                doubted = self.is_in_doubt
            sequence.cached.add(version)
        self.is_in_doubt = doubted

    def counts(self) -> dict[str, int]:
        """What vLLM's side did (`connector.Counts`)."""
        return self._core.call("handed")

    def _front_of(self, sequence: Sequence, version: Version) -> Front | None:
        """Of a file that may be used; one that is of no use to it is of none to anybody."""
        path = self._shelf.path(sequence.request.trajectory)
        if not sequence.generated or not path.exists():
            return None
        front = read_front(path)
        if front is not None and self._fits(front, sequence, version):
            return front
        log.debug("%s is computed anew: its KV is of no use", sequence.request.trajectory)
        path.unlink(missing_ok=True)
        return None

    def _fits(self, front: Front, sequence: Sequence, version: Version) -> bool:
        """As far as this side knows; layout and bytes are the connector's to check."""
        if (front.run, front.trajectory) != (self._run, sequence.request.trajectory):
            return False
        if front.block < 1 or not may_use(self._mode, front.versions, version):
            return False
        return blocks_of_use(front.tokens, sequence.all_tokens, front.block) > 0


def handing_over(core: EngineCore, run: str, folder: Path, mode: UpdateMode) -> Handover:
    """`EngineRefused` where vLLM was not opened for it."""
    if not isinstance(core, Core) or not core.of[1].handover:
        raise EngineRefused("rollouts.vllm.kv_handover: this vLLM was opened without it")
    return Handover(core, run, folder, mode)
