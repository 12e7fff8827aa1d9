"""The options of an engine that computes a model (`EngineOptions`)."""

from dataclasses import dataclass

from rollstream.producers.engines.drafting import DraftSource, DraftSwitch


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`context_max` bounds a sequence in tokens; tokens of a running trajectory are emitted every
    `emit_every`.

    `vllm` serves LoRA adapters of a rank up to `adapter_rank` (0: none), `torch` of any rank.
    """

    slots: int
    context_max: int
    emit_every: int = 64
    device: str | None = None
    dtype: str = "float32"
    drafts: DraftSource | None = None
    gate: DraftSwitch | None = None
    adapter_rank: int = 0

    def __post_init__(self) -> None:
        assert min(self.slots, self.emit_every) >= 1, "at least one slot, and one token an emission"
        assert self.context_max >= 2, "a prompt token and a generated one"
