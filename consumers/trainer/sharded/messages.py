"""What rank 0 tells the other ranks, and what they answer: typed values as msgpack, arrays as their
little-endian bytes. Nothing that is received is ever executed.
"""

from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from consumers.trainer.sample import Sample
from storage.manifest import Delta, Manifest, TensorFiles
from streams.records import Span

_T = TypeVar("_T")


class WireSample(Struct, frozen=True, array_like=True):
    """A `Sample` that travels; arrays as bytes of the types that a `Sample` has."""

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
        """The sample again."""
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


def wire(sample: Sample) -> WireSample:
    """The sample as it travels."""
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
    """Rank 0 lives and has no work."""


class Begin(Struct, frozen=True, tag=True):
    """Shard the model; it must have this hash, and rank 0's settings (JSON) hold for all."""

    model_hash: str
    settings: bytes


class Round(Struct, frozen=True, tag=True):
    """Train the samples from `version` with all others; not counted when it only fills the round
    up.
    """

    version: int
    counts: bool
    samples: tuple[WireSample, ...]


class Finish(Struct, frozen=True, tag=True):
    """Change the weights."""


class Load(Struct, frozen=True, tag=True):
    """Take a slice of every tensor of a checkpoint, and these counters."""

    updates: int
    moved: int


class Hash(Struct, frozen=True, tag=True):
    """Hash what this rank has of masters and optimiser."""


class Gather(Struct, frozen=True, tag=True):
    """Keep the tensors that this rank owns, whole, as copy `copy`: published ones as `dtype`, or
    all of the state if that is "". Copies that are not in `alive` are not needed any more.
    """

    copy: int
    dtype: str
    alive: tuple[int, ...]


class WriteShards(Struct, frozen=True, tag=True):
    """Write a copy's tensors; the answer is `TensorFiles`."""

    copy: int
    folder: str
    stem: str
    shard_bytes: int


class Encode(Struct, frozen=True, tag=True):
    """Encode a copy as differences from copy `base`, which are the tensors of `parent`; the answer
    is `Encoded`.
    """

    copy: int
    base: int
    parent: Manifest


class WriteDelta(Struct, frozen=True, tag=True):
    """Write what was encoded last; the answer is `Delta`."""

    folder: str
    stem: str
    shard_bytes: int


class Identify(Struct, frozen=True, tag=True):
    """Hash the tensors of a copy; the answer is `Identities`."""

    copy: int


class Close(Struct, frozen=True, tag=True):
    """The trainer has ended."""


Asked = WriteShards | Encode | WriteDelta | Identify
"""What the thread that writes answers."""
Told = Tick | Begin | Round | Finish | Load | Hash | Gather | Asked | Close


class Encoded(Struct, frozen=True, tag=True):
    """Bytes of the payloads, and what the manifest will say of the tensors."""

    bytes: int
    weights: TensorFiles


class Identities(Struct, frozen=True, tag=True):
    """Hash by name, and the names that share another's memory."""

    hashes: dict[str, str]
    tied: dict[str, str]


class Wrote(Struct, frozen=True, tag=True):
    """Whole tensors."""

    files: TensorFiles


class WroteDelta(Struct, frozen=True, tag=True):
    """Differences; the `parent_hash` in it says nothing."""

    delta: Delta


class Failed(Struct, frozen=True, tag=True):
    """It could not; why."""

    message: str


Answer = Encoded | Identities | Wrote | WroteDelta | Failed


def encode(value: Any) -> bytes:
    """The value's bytes."""
    return msgspec.msgpack.encode(value)


def decode(data: bytes | memoryview, type_: Any) -> Any:
    """The value of this type (a union of structs too); `msgspec.DecodeError` for anything else."""
    return msgspec.msgpack.decode(data, type=type_)
