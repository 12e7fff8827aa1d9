"""The memory of a vLLM engine on a card."""

from rollstream.run.sizes import arithmetic as sums
from rollstream.run.sizes.arithmetic import MemoryLine
from rollstream.run.sizes.shapes import ModelShape

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks to which vLLM pads an adapter's rank (`LORA_RANKS` in `engines/vllm/core.py`)."""
VLLM_STEP_TOKENS = 2048
"""Tokens per step for which vLLM reserves activations. `DEFAULT_MAX_NUM_BATCHED_TOKENS` of vLLM
0.32's `config/scheduler.py`, which `LLMEngine.from_engine_args` takes on every card; larger
defaults apply to `LLM` and to the server.
"""
ADAPTERS_TOGETHER = 8
"""Most adapters in one step (`TOGETHER` in `engines/vllm/adapters.py`)."""
VLLM_FIXED_BYTES = 1.5e9
"""CUDA graphs and workspaces of a vLLM engine on one card. A choice: vLLM's own logs have .16 to
.33 GiB outside torch and .13 to .36 GiB of graphs (its issues 10027, 11349, 14452), FlashInfer's
workspace is 394 MiB (`envs.py`); .4 GB are for larger models.
"""


def vllm_lines(
    shape: ModelShape, tensor_parallel: int, slots: int, item: float, lora_rank: int = 0
) -> tuple[MemoryLine, ...]:
    """Returns the memory lines without the KV cache, which gets the rest of the share. A number of
    the layers has `item` bytes, of the head 4 (`rollouts.vllm.head_float32`).
    """
    padded = next((rank for rank in ADAPTER_RANKS if rank >= lora_rank), lora_rank)
    # Every matrix has the hidden size on one side. That side's factor is whole on each card.
    sides = sum(
        shape.hidden + (a + b - shape.hidden) / tensor_parallel for a, b in shape.linear_layers
    )
    # vLLM allocates the factors of as many versions as one step may use, in the type of its layers;
    # other versions are in host memory (`create_lora_weights` in vLLM 0.32's `lora/layers/`).
    factors = padded * shape.layers * sides if lora_rank else 0
    head = sums.FLOAT32 * shape.embedding_parameters
    weights = item * shape.layers * shape.layer_parameters + sums.BFLOAT16 * shape.root_parameters
    width = max(shape.feed_forward, shape.query_size + 2 * shape.kv_size)  # gate, up; q, k, v
    passes = VLLM_STEP_TOKENS * sums.BFLOAT16 * (4 * shape.hidden + 3 * width)
    return (
        MemoryLine(sums.WEIGHTS, (weights + head) / tensor_parallel),
        MemoryLine("adapters in one step", ADAPTERS_TOGETHER * sums.BFLOAT16 * factors),
        MemoryLine("activations of a step", passes / tensor_parallel),
        MemoryLine(
            "logits", sums.LOGITS_COPIES * sums.FLOAT32 * slots * shape.vocabulary / tensor_parallel
        ),
        MemoryLine("graphs and workspaces", VLLM_FIXED_BYTES),
    )
