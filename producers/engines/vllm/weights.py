"""The version that vLLM serves: loading another one, and comparing the served weights with the
tensors that they came from.

From the start of a load until one succeeds, no version is held. All work that can run beside
decoding (checks, and for a core in another process the copy to shared memory) is done in `prepare`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from rollstream.producers.engines.base import WeightComparison, WeightUpdate
from rollstream.producers.engines.vllm.chunks import PreparedUpdate, check_update, patch_chunks, whole_chunks
from rollstream.producers.engines.vllm.core import LocalCore
from rollstream.producers.engines.vllm.messages import ChunkMessage, StagedMessage, stage_patches, stage_tensors
from rollstream.producers.engines.vllm.parameter_map import ExpectedTensors
from rollstream.producers.engines.vllm.staging import StagedFile
from rollstream.errors import EngineRefused
from rollstream.streams.values import Version


class VllmWeights:
    """With `in_place` vLLM stores its matrices as a checkpoint does, so that they can be
    patched.
    """

    def __init__(self, core: LocalCore, needed: ExpectedTensors, in_place: bool) -> None:
        self._core, self._needed, self._in_place = core, needed, in_place
        self.held: Version | None = None
        """The version whose weights are served whole; None during a load and after a failed one."""

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        """The update with `prepared` set. Raises `EngineRefused`, which names the wrong tensor."""
        prepared = check_update(update, self._needed, self.held, self._in_place)
        if self._core.has_process:
            prepared = replace(prepared, messages=tuple(self._staged(update, prepared)))
        return replace(update, prepared=prepared)

    def load(self, update: WeightUpdate) -> None:
        """Serve these weights. After `EngineRefused` no version is held."""
        prepared = update.prepared
        if not isinstance(prepared, PreparedUpdate) or not self._joins(prepared):
            prepared = self.prepare(update).prepared
            assert isinstance(prepared, PreparedUpdate), "prepare sets it"
        self.held = None
        try:
            self._core.call("start_weight_update")
            for message in self._messages(update, prepared):
                self._core.call("update_weights", message)
            self._core.call("finish_weight_update")
        except Exception as error:
            self._core.call("give_up_update")
            raise EngineRefused(
                f"weights: version {update.version} was not loaded whole, nothing is served until "
                f"one is: {error}"
            ) from error
        self._core.stamp(str(update.version))
        self.held = update.version

    def compare(self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> WeightComparison:
        """As `Engine.read_back`; compares nothing where tensors are split between GPUs."""
        if self._core.is_parallel:
            return WeightComparison(0, ())
        own, needed = self._needed.own(tensors), self._needed
        asked = sorted({needed.named(name) for name in names} & set(needed.shapes))
        differing = [
            name
            for name in asked
            if any(self._differs(place, own[name]) for place in (name, *needed.tied.get(name, ())))
        ]
        return WeightComparison(len(asked), tuple(differing))

    def _joins(self, prepared: PreparedUpdate) -> bool:
        """Whether it can be applied to the weights that are served now."""
        return prepared.patches is None or prepared.base == self.held

    def _messages(self, update: WeightUpdate, prepared: PreparedUpdate) -> Iterator[ChunkMessage]:
        if prepared.messages:
            for staged in prepared.messages:
                yield staged.message
                staged.file.close()
        elif prepared.patches is not None:
            yield from ({"patches": some} for some in patch_chunks(prepared.patches))
        else:
            yield from ({"tensors": some} for some in whole_chunks(self._needed, update.tensors))

    def _staged(self, update: WeightUpdate, prepared: PreparedUpdate) -> Iterator[StagedMessage]:
        if prepared.patches is not None:
            yield from map(stage_patches, patch_chunks(prepared.patches))
        else:
            yield from map(stage_tensors, whole_chunks(self._needed, update.tensors))

    def _differs(self, name: str, tensor: torch.Tensor) -> bool:
        if not self._core.has_process:
            return bool(self._core.call("differs", name, tensor))
        file = StagedFile([(name, tensor)])
        try:
            return bool(self._core.call("differs_from_staged", file.path, file.entries))
        finally:
            file.close()
