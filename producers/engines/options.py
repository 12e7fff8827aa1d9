"""The options of an engine that computes a model (`EngineOptions`)."""

from dataclasses import dataclass

from rollstream.producers.engines.drafting import DraftSource, DraftSwitch


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Holds the options of an engine that computes a model: at most `slots` sequences of at most
    `context_max` tokens each are decoded together; tokens of a running trajectory are emitted every
    `emit_every`.

    `device` None is the CPU for the engine `torch`; for `vllm` it is a GPU where there is one. The
    layers of `torch` compute in `dtype`. With `drafts` the engine verifies drafts from this source
    while the `gate` (default: a new one) finds that they save time. `vllm` serves LoRA adapters of
    a rank up to `adapter_rank` (0: none), `torch` of any rank.
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
