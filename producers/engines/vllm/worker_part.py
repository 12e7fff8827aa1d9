"""The extension of vLLM's worker: loading weights, reading them back, and drafts.

vLLM imports this module in each of its workers (`worker_extension_cls`). The import registers the
transfer engine there, and makes a worker of another process end with the rollout that started it.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportUntypedBaseClass=false

from typing import Any

import torch

from rollstream.producers.engines.vllm.ending import end_with_parent
from rollstream.producers.engines.vllm.worker import DraftingWorker, patch_sampler
from rollstream.producers.engines.vllm.release import WeightTransferEngineFactory
from rollstream.producers.engines.vllm.served import served_tensors
from rollstream.producers.engines.vllm.staging import StagedTensor, staged_tensors
from rollstream.producers.engines.vllm.transfer import VersionTransfer

end_with_parent()
patch_sampler()
if "rollstream" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("rollstream", VersionTransfer)


class WorkerExtension(DraftingWorker):
    """Methods of vLLM's worker, whose attributes they use."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def give_up_update(self) -> None:
        """End an update that failed between chunks, as vLLM's own methods do when a chunk fails."""
        self._weight_update_active = False
        self.weight_transfer_engine.give_up()

    def differs(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the served bits differ from those that loading this tensor gives."""
        served = served_tensors(self.model_runner.get_model(), name)
        return not all(_is_same(one, tensor) for one in served)

    def differs_from_staged(self, path: str, entries: list[StagedTensor]) -> bool:
        """As `differs`, for the one tensor of a staged file."""
        ((name, tensor),) = staged_tensors(path, entries)
        return self.differs(name, tensor)


def _is_same(served: torch.Tensor, tensor: torch.Tensor) -> bool:
    wanted = tensor.to(device=served.device, dtype=served.dtype)
    return torch.equal(_bits(served), _bits(wanted))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits as integers, so that −0 differs from +0."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.element_size()])
