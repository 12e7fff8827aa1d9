"""Commands of rank 0 to the other ranks, and their replies: typed values as msgpack, arrays as
little-endian bytes. No received data is ever executed (no pickle).
"""

from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from rollstream.consumers.trainer.data.sample import Sample
from rollstream.storage.weights.manifest import Delta, Manifest, TensorFiles
from rollstream.streams.values import Span

_T = TypeVar("_T")


class WireSample(Struct, frozen=True, array_like=True):
    """A `Sample` on the wire; its arrays are bytes of the types that a `Sample` has."""

    trajectory: str
    group: int
    tokens: bytes
    sources: bytes
    logprobs: bytes
    spans: tuple[Span, ...]
    reward: float
    advantage: float
    temperature: float
    mask: bytes
    task: str

    def sample(self) -> Sample:
        """The decoded sample."""
        return Sample(
            self.trajectory,
            self.group,
            np.frombuffer(self.tokens, np.uint32),
            np.frombuffer(self.sources, np.uint8),
            np.frombuffer(self.logprobs, np.float32),
            self.spans,
            self.reward,
            self.advantage,
            self.temperature,
            np.frombuffer(self.mask, np.bool_),
            self.task,
        )


def wire_sample(sample: Sample) -> WireSample:
    """The wire form of a sample."""
    return WireSample(
        sample.trajectory,
        sample.group,
        np.ascontiguousarray(sample.tokens, np.uint32).tobytes(),
        np.ascontiguousarray(sample.sources, np.uint8).tobytes(),
        np.ascontiguousarray(sample.logprobs, np.float32).tobytes(),
        sample.spans,
        sample.reward,
        sample.advantage,
        sample.temperature,
        np.ascontiguousarray(sample.mask, np.bool_).tobytes(),
        sample.task,
    )


class Tick(Struct, frozen=True, tag=True):
    """Heartbeat: rank 0 is alive and has no work."""


class BeginTraining(Struct, frozen=True, tag=True):
    """Shard the model, which must have this hash; rank 0's settings (JSON) hold for all ranks."""

    model_hash: str
    settings: bytes


class TrainRound(Struct, frozen=True, tag=True):
    """Train the samples from `version` in a round of all ranks; `counts` is False if the samples
    only fill up the round.
    """

    version: int
    counts: bool
    samples: tuple[WireSample, ...]


class FinishUpdate(Struct, frozen=True, tag=True):
    """Change the weights."""


class LoadState(Struct, frozen=True, tag=True):
    """Read this rank's rows of every tensor of a checkpoint: these files of this folder."""

    folder: str
    files: TensorFiles


class HashState(Struct, frozen=True, tag=True):
    """Hash this rank's slices of masters and optimiser state."""


class GatherCopy(Struct, frozen=True, tag=True):
    """Keep this rank's tensors as copy `copy`: the whole published tensors that it owns as `dtype`,
    gathered, or its rows of the state if that is "". Copies that are not in `alive` are dropped.
    """

    copy: int
    dtype: str
    alive: tuple[int, ...]


class WriteShards(Struct, frozen=True, tag=True):
    """Write a copy's tensors; the reply is `WroteShards`."""

    copy: int
    folder: str
    stem: str
    shard_bytes: int


class EncodeDelta(Struct, frozen=True, tag=True):
    """Encode a copy as differences from copy `base`, the tensors of version `parent`; the reply is
    `EncodedDelta`.
    """

    copy: int
    base: int
    parent: Manifest


class WriteDelta(Struct, frozen=True, tag=True):
    """Write the differences that were encoded last; the reply is `WroteDelta`."""

    folder: str
    stem: str
    shard_bytes: int


class IdentifyTensors(Struct, frozen=True, tag=True):
    """Hash the tensors of a copy; the reply is `TensorIdentities`."""

    copy: int


class EndRanks(Struct, frozen=True, tag=True):
    """The trainer has ended."""


WriteCommand = WriteShards | EncodeDelta | WriteDelta | IdentifyTensors
"""Commands that a rank's writing thread executes and replies to."""
RankCommand = (
    Tick
    | BeginTraining
    | TrainRound
    | FinishUpdate
    | LoadState
    | HashState
    | GatherCopy
    | WriteCommand
    | EndRanks
)


class EncodedDelta(Struct, frozen=True, tag=True):
    """Bytes of the encoded payloads, and the manifest's entries for the tensors."""

    bytes: int
    weights: TensorFiles


class TensorIdentities(Struct, frozen=True, tag=True):
    """Hashes by name; `tied` maps a name to the one whose memory it shares."""

    hashes: dict[str, str]
    tied: dict[str, str]


class WroteShards(Struct, frozen=True, tag=True):
    """The files of written whole tensors."""

    files: TensorFiles


class WroteDelta(Struct, frozen=True, tag=True):
    """The written differences; the `parent_hash` in `delta` is not valid."""

    delta: Delta


class WriteFailed(Struct, frozen=True, tag=True):
    """The command failed; `message` is the exception's text."""

    message: str


WriteReply = EncodedDelta | TensorIdentities | WroteShards | WroteDelta | WriteFailed


def encode(value: Any) -> bytes:
    """The msgpack bytes of a value."""
    return msgspec.msgpack.encode(value)


def decode(data: bytes | memoryview, type_: Any) -> Any:
    """The value of this type (or union of structs); `msgspec.DecodeError` for other bytes."""
    return msgspec.msgpack.decode(data, type=type_)
