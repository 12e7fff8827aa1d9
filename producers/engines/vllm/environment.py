"""Checks the installed vLLM and prepares its environment (`require_vllm`), and computes the size of
an engine on this machine (`shape_for`).

vLLM's interfaces for reinforcement learning change between releases, so one release is supported at
a time, and any other is refused before it can fail inside vLLM. vLLM's environment variables must
be set before its first import. `VllmShape` has the sizes of an engine, computed from a run's
settings and the device.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch
from transformers import PreTrainedConfig

from rollstream.errors import ConfigurationError
from rollstream.producers.settings import EngineArgument, VllmSettings

CPU_BLOCK_TOKENS = 32  # tokens; the block size of vLLM's attention on the CPU
CPU_STEP_TOKENS = 2048  # tokens
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """Describes the room for LoRA adapters of at most `rank` on the layers whose names end with one
    of `targets`: `together` adapters in one step, `kept` adapters loaded.
    """

    rank: int
    targets: tuple[str, ...]
    together: int
    kept: int


@dataclass(frozen=True, slots=True)
class VllmShape:
    """Holds the arguments of one vLLM engine. The KV cache has `blocks` blocks of `block` tokens in
    `kv_bytes` of memory; a step computes at most `step_tokens` tokens, and with `chunked` it may
    compute part of a prompt. None leaves a size to vLLM. With `process` vLLM's core is a process of
    its own; with `head_float32` logits are computed in float32. At most `drafts` tokens of a
    sequence are drafted per step.
    """

    slots: int
    context_max: int
    dtype: str
    process: bool
    tensor_parallel: int = 1
    memory_share: float = 0.9
    eager: bool = False
    block: int | None = None
    blocks: int | None = None
    kv_bytes: int | None = None
    chunked: bool | None = None
    step_tokens: int | None = None
    drafts: int = 0
    head_float32: bool = False
    adapters: AdapterSizes | None = None
    args: Mapping[str, EngineArgument] = field(default_factory=dict[str, EngineArgument])
    """Arguments of `rollouts.vllm.args`, passed on as they are."""


def shape_for(
    config: PreTrainedConfig,
    slots: int,
    context_max: int,
    device: str,
    settings: VllmSettings,
    drafts: int = 0,
) -> VllmShape:
    """Return the arguments of an engine. On the CPU the KV cache holds all slots at full context,
    as in the embedded engine, unless `kv_gib` is less. On a GPU vLLM divides the memory itself.
    """
    auto = "float32" if device == "cpu" else "bfloat16"
    kind = auto if settings.dtype == "auto" else settings.dtype
    given = None if settings.kv_gib is None else int(settings.kv_gib * GIB)
    head = settings.head_float32 and kind != "float32"
    if device != "cpu":
        return VllmShape(
            slots,
            context_max,
            kind,
            settings.process,
            settings.tensor_parallel,
            settings.memory_share,
            kv_bytes=given,
            drafts=drafts,
            head_float32=head,
            args=settings.args,
        )
    block_bytes = _token_bytes(config, kind) * CPU_BLOCK_TOKENS
    blocks = slots * math.ceil(context_max / CPU_BLOCK_TOKENS) + 1  # vLLM reserves one block
    if given is not None:
        least = math.ceil(context_max / CPU_BLOCK_TOKENS) + 1  # one sequence
        blocks = max(least, min(blocks, given // block_bytes))
    return VllmShape(
        slots,
        context_max,
        kind,
        settings.process,
        settings.tensor_parallel,
        eager=True,
        block=CPU_BLOCK_TOKENS,
        blocks=blocks,
        kv_bytes=block_bytes * blocks,
        # vLLM on the CPU cannot cut the prompt of a request with a seed: it would rewind a random
        # generator, which CPU generators do not support.
        chunked=False,
        step_tokens=max(CPU_STEP_TOKENS, context_max, slots * (1 + drafts)),
        drafts=drafts,
        head_float32=head,
        args=settings.args,
    )


def _token_bytes(config: PreTrainedConfig, kind: str) -> int:
    """Return the bytes of the keys and values of one token."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    item = torch.empty(0, dtype=getattr(torch, kind)).element_size()
    return 2 * config.num_hidden_layers * kv_heads * width * item


RELEASE = "0.32"
INSTALL = "the CPU build by `make vllm`, the GPU build by `pip install 'rollstream[vllm]'`"

_ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # set for each engine separately
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a rollout has threads when its engine starts
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "NUMBA_NUM_THREADS": "1",
}
_WITHOUT_A_GPU = {
    "TORCHDYNAMO_DISABLE": "1",  # else 16 s of compilation in the first batch
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # rollouts of a machine would share the first cores
}


def require_vllm() -> None:
    """Prepare the process for importing vLLM. Raises `ConfigurationError`, which names the package
    to install, if the supported release is missing.
    """
    found = installed_release()
    if found is None:
        raise ConfigurationError(f"rollouts.engine: 'vllm' is not installed; get {INSTALL}")
    if not found.startswith(f"{RELEASE}."):
        raise ConfigurationError(
            f"rollouts.engine: vLLM {found} is installed, this engine is written for {RELEASE}; "
            f"get {INSTALL}"
        )
    for name, value in (_ALWAYS if has_gpu() else _ALWAYS | _WITHOUT_A_GPU).items():
        os.environ.setdefault(name, value)


def installed_release() -> str | None:
    """Return the installed release of vLLM, None if it is missing."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def has_gpu() -> bool:
    return torch.cuda.is_available()
