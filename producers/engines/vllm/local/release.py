"""All names of vLLM that the engine uses, to check when the supported release changes. Modules of
the rollout import it inside functions, after `require_vllm`.
"""

from vllm import EngineArgs, SamplingParams
from vllm.config import KVTransferConfig, WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.sampling_params import RequestOutputKind
from vllm.triton_utils import HAS_TRITON
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.sample import rejection_sampler

__all__ = [
    "HAS_TRITON",
    "CheckpointWeightPatch",
    "EngineArgs",
    "EngineCoreRequestType",
    "EngineDeadError",
    "KVTransferConfig",
    "LLMEngine",
    "LoRARequest",
    "PPMissingLayer",
    "RequestOutputKind",
    "SamplingParams",
    "StatLoggerBase",
    "WeightTransferConfig",
    "WeightTransferEngine",
    "WeightTransferEngineFactory",
    "WeightTransferInitInfo",
    "WeightTransferUpdateInfo",
    "finalize_layerwise_reload",
    "get_layerwise_info",
    "initialize_layerwise_reload",
    "load_checkpoint_weight_patches",
    "materialize_meta_tensor",
    "rejection_sampler",
    "restore_layer_refs",
    "to_meta_tensor",
]
