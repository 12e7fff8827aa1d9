"""How vLLM is told of the connector, and where that cannot work."""

# pyright: reportUnknownVariableType=false, reportAttributeAccessIssue=false

from collections.abc import Iterable
from typing import Any

from producers.engines.vllm_engine.settings import EngineShape
from streams.errors import EngineRefused

MODULE = "producers.engines.vllm_engine.handover.connector"


def connection(shape: EngineShape, others: Iterable[EngineShape]) -> Any:
    """vLLM's `kv_transfer_config`; None where nothing is handed over. `EngineRefused` where KV is
    cut between GPUs, or beside an engine of this process that is otherwise: vLLM has one connector
    per process, or none.
    """
    from producers.engines.vllm_engine.release import KVTransferConfig

    beside = {other.handover for other in others if not other.process}
    if not shape.process and beside - {shape.handover}:
        raise EngineRefused(
            "rollouts.vllm.kv_handover must be the same for all vLLM engines within one process"
        )
    if not shape.handover:
        return None
    if shape.tensor_parallel > 1:
        raise EngineRefused(
            "rollouts.vllm.kv_handover must be false with rollouts.vllm.tensor_parallel > 1"
        )
    # To vLLM it only takes in: what is handed out is asked for by ourselves.
    return KVTransferConfig(
        kv_connector="HandoverConnector", kv_connector_module_path=MODULE, kv_role="kv_consumer"
    )
