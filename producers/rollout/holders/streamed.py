"""Streams large versions into the engine, whose own tensors are the base of their deltas: no second
copy is in memory (`storage/weights/streamed.py`).
"""

import logging
from collections.abc import Mapping

import torch

from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.rollout.holder import Fetch, WeightHolder
from rollstream.storage.weights.manifest import Manifest
from rollstream.storage.weights.streamed import StreamedTensors, WrongBase, stream_version
from rollstream.streams.values import Version

log = logging.getLogger(__name__)


class StreamedHolder(WeightHolder):
    """Holds the manifest of the tensors that the engine serves."""

    def __init__(self) -> None:
        self._served: Manifest | None = None
        self._taken: Manifest | None = None

    def note_taken(self, update: WeightUpdate) -> None:
        self._taken = _streamed(update.tensors).manifest
        self._served = self._served or self._taken

    def note_served(self, version: Version | None) -> None:
        if version is None:
            self._served = None
        elif self._taken is not None and self._taken.version == version:
            self._served = self._taken

    def update(self, fetch: Fetch) -> tuple[Manifest, WeightUpdate]:
        # Tensors that the engine does not return bit for bit are fetched again without a base.
        wrong: frozenset[str] = frozenset()
        while True:
            tensors = self._fetched(fetch, wrong)
            try:
                update = WeightUpdate(fetch.version, tensors, tensors.base)
                return tensors.manifest, fetch.prepare(update)
            except WrongBase as error:
                if error.names <= wrong:
                    raise
                log.error("version %s is fetched again without a base: %s", fetch.version, error)
                wrong |= error.names

    def _fetched(self, fetch: Fetch, wrong: frozenset[str]) -> StreamedTensors:
        return fetch.meter.count(
            lambda: stream_version(
                fetch.store, fetch.version, fetch.manifest_hash, self._served, wrong
            )
        )

    def sizes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        return _streamed(tensors).sizes  # none is decoded for its size


def _streamed(tensors: Mapping[str, torch.Tensor]) -> StreamedTensors:
    assert isinstance(tensors, StreamedTensors), "an update of this holder"
    return tensors
