"""Opens vLLM's engine and its served weights from settings: in this process, in one of its own, or
on a vLLM server by URL.
"""

from transformers import PreTrainedConfig

from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.vllm.core import open_core
from rollstream.producers.engines.vllm.environment_part import has_gpu, require_vllm
from rollstream.producers.engines.vllm.protocol import EngineCore, CoreWeights
from rollstream.producers.engines.vllm.parameter_map import expected_tensors
from rollstream.producers.engines.vllm.environment import shape_for
from rollstream.producers.engines.vllm.weights import VllmWeights
from rollstream.producers.settings import VllmSettings


def open_core_and_weights(
    config: PreTrainedConfig,
    options: EngineOptions,
    settings: VllmSettings,
    drafts: int = 0,
) -> tuple[EngineCore, CoreWeights]:
    """Open the core of an engine, with dummy weights until weights are loaded, and its weights. At
    most `drafts` tokens of a sequence are drafted per step. Raises `ConfigurationError` or
    `EngineRefused`, which names what is missing.
    """
    if settings.url is not None:
        from rollstream.producers.engines.vllm.remote.factory import open_remote  # only for a URL

        return open_remote(config, options.slots, options.context_max, settings)
    require_vllm()
    device = options.device or ("cuda" if has_gpu() else "cpu")
    needed = expected_tensors(config)
    sizes = options.slots, options.context_max
    core = open_core(config, shape_for(config, *sizes, device, settings, drafts))
    return core, VllmWeights(core, needed, in_place=device != "cpu")
