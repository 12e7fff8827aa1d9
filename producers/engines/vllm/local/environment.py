"""Checks which vLLM is installed: its interfaces for reinforcement learning change between
releases, so one release is supported at a time. Imports no vLLM.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from transformers import PreTrainedConfig

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.settings import EngineArgument, VllmSettings

CPU_BLOCK_TOKENS = 32  # tokens in a block of the KV cache, as vLLM's attention on the CPU needs
CPU_STEP_TOKENS = 2048  # least value of `VllmShape.step_tokens` on the CPU
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """Memory for LoRA adapters: `together` different ones in one step, `kept` loaded ones, on the
    layers whose names end with one of `targets`.
    """

    rank: int
    targets: tuple[str, ...]
    together: int
    kept: int


@dataclass(frozen=True, slots=True)
class VllmShape:
    """The KV cache has `blocks` blocks of `block` tokens in `kv_bytes`. A step computes at most
    `step_tokens` tokens, with `chunked` also a part of a prompt, and drafts at most `drafts` tokens
    of a sequence. Layers compute in `dtype`, with `head_float32` logits in float32.
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
    """On the CPU the KV cache has room for all slots at full context, unless `kv_gib` allows less,
    and always for one such sequence. On a GPU vLLM chooses the sizes, within `memory_share` or
    `kv_gib`.
    """
    auto = "float32" if device == "cpu" else "bfloat16"
    kind = auto if settings.dtype == "auto" else settings.dtype
    kv_bytes = None if settings.kv_gib is None else int(settings.kv_gib * GIB)
    head = settings.head_float32 and kind != "float32"
    if device != "cpu":
        return VllmShape(
            slots,
            context_max,
            kind,
            settings.process,
            settings.tensor_parallel,
            settings.memory_share,
            kv_bytes=kv_bytes,
            drafts=drafts,
            head_float32=head,
            args=settings.args,
        )
    block_bytes = _token_bytes(config, kind) * CPU_BLOCK_TOKENS
    blocks = slots * math.ceil(context_max / CPU_BLOCK_TOKENS) + 1  # vLLM reserves one block
    if kv_bytes is not None:
        blocks_min = math.ceil(context_max / CPU_BLOCK_TOKENS) + 1  # one sequence
        blocks = max(blocks_min, min(blocks, kv_bytes // block_bytes))
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
        # On the CPU vLLM cannot compute a seeded request's prompt in parts: for that it rewinds the
        # request's random generator, which CPU generators do not support.
        chunked=False,
        step_tokens=max(CPU_STEP_TOKENS, context_max, slots * (1 + drafts)),
        drafts=drafts,
        head_float32=head,
        args=settings.args,
    )


def _token_bytes(config: PreTrainedConfig, kind: str) -> int:
    text: Any = config.get_text_config()  # pyright: ignore[reportUnknownMemberType]
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    item = torch.empty(0, dtype=getattr(torch, kind)).element_size()
    # Keys and values, over all layers.
    return 2 * text.num_hidden_layers * kv_heads * width * item


RELEASE = "0.32"
"""The supported release of vLLM, with any patch number."""
INSTALL = "the CPU build by `make vllm`, the GPU build by `pip install 'rollstream[vllm]'`"

_ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # `VllmShape.process` decides for each engine
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a rollout has threads, so it must not fork
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "NUMBA_NUM_THREADS": "1",
}
_WITHOUT_A_GPU = {
    "TORCHDYNAMO_DISABLE": "1",  # else 16 s of compilation in the first batch
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all rollouts of a machine share its first cores
}


def require_vllm() -> None:
    """Set vLLM's environment variables, except those that the user has set, before its first
    import. Raises `ConfigurationError`, which names the package to install, if vLLM is missing or
    of another release than `RELEASE`.
    """
    release = installed_release()
    if release is None:
        raise ConfigurationError(f"rollouts.engine: 'vllm' is not installed; get {INSTALL}")
    if not release.startswith(f"{RELEASE}."):
        raise ConfigurationError(
            f"rollouts.engine: vLLM {release} is installed, this engine is written for {RELEASE}; "
            f"get {INSTALL}"
        )
    for name, value in (_ALWAYS if has_gpu() else _ALWAYS | _WITHOUT_A_GPU).items():
        os.environ.setdefault(name, value)


def installed_release() -> str | None:
    """Returns the version of the installed GPU or CPU build."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def has_gpu() -> bool:
    return torch.cuda.is_available()
