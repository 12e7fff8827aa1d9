"""What the rollout's side asks of the connector of its vLLM: hand out what a request has, and what
came of it all.

Without tensor parallelism vLLM's scheduler and its one worker are in the same process, so the
worker, which can be called by name, finds the connector that knows the blocks of each request.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import Any
from weakref import WeakValueDictionary

CONNECTORS: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""By vLLM's id of the engine, the connectors of this process's schedulers."""


class HandingWorker:
    """Methods of vLLM's worker, whose attributes they use."""

    vllm_config: Any

    def hand_out(self, key: str, about: dict[str, Any]) -> int:
        """Bytes written for the request that we call `key`; 0 where there is nothing to hand out,
        or no room.
        """
        connector = self._connector()
        return 0 if connector is None else connector.hand_out(key, about)

    def handed(self) -> dict[str, int]:
        """The fields of `connector.Counts`."""
        connector = self._connector()
        return {} if connector is None else connector.counted()

    def _connector(self) -> Any:
        """None where vLLM was made to put its worker into another process: then nothing moves."""
        return CONNECTORS.get(self.vllm_config.kv_transfer_config.engine_id)
