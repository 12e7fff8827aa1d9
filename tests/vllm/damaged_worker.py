"""The worker class of a test's engine: the product's extension, and a way to damage what a worker
serves.
"""

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from rollstream.producers.engines.vllm.local.parameter_map import ServedPart, served_part
from rollstream.producers.engines.vllm.local.worker import WorkerExtension


class DamagedWorker(WorkerExtension):
    """As the product's."""

    def damage_factor(self, rank: int, adapter: int, layer: str, part: int) -> None:
        """Change one element of one worker's part of a stacked factor B."""
        if self.rank == rank:
            manager = self.model_runner.lora_manager._adapter_manager
            slot = manager.lora_index_to_id.index(adapter)
            manager.modules[layer].lora_b_stacked[part][slot, 0, -1, 0] += 1.0

    def damage(self, rank: int, name: str) -> None:
        """Flip the lowest bit of the last element of one worker's part of a tensor."""
        if self.rank != rank:
            return
        part = served_part(self.model_runner.get_model(), name)
        served = getattr(part.layer, part.kind)
        is_packed = not served.numel()
        whole = ServedPart(part.layer, part.kind, slice(None))
        damaged = whole.copies()[0].clone() if is_packed else served.data
        damaged[part.rows].view(torch.int32)[-1:].view(-1)[-1:].bitwise_xor_(1)
        if is_packed:
            part.layer.weight = torch.nn.Parameter(damaged, requires_grad=False)
            dispatch_cpu_unquantized_gemm(part.layer, remove_weight=True)
