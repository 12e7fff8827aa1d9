"""What every engine that computes a model is opened with, beside the model itself."""

from dataclasses import dataclass

from rollstream.producers.drafts.source_part import DraftSource
from rollstream.producers.drafts.gate import DraftGate


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`slots` sequences of at most `context_max` tokens are decoded together.

    A running trajectory is emitted every `emit_every` tokens. `device` None is the CPU for the
    engine `torch`, and a GPU where there is one for `vllm`. With `drafts` the engine verifies
    drafts from this source while `switch` (default: a new one) finds that they pay.
    """

    slots: int
    context_max: int
    emit_every: int = 64
    device: str | None = None
    drafts: DraftSource | None = None
    switch: DraftGate | None = None

    def __post_init__(self) -> None:
        assert min(self.slots, self.emit_every) >= 1, "at least one slot, and one token an emission"
        assert self.context_max >= 2, "a prompt token and a generated one"
