"""Calls to a vLLM core that runs in a process of its own; each ends when that process dies.

vLLM 0.32 waits without end if its core dies during a call (`call_utility`): no code fails the
pending future. A rollout that hangs there neither generates nor is restarted. So every call of
vLLM's client goes through `call_core`, which checks once a second that the core is alive.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import time
from concurrent.futures import Future
from functools import partial
from typing import Any

CHECK_S = 1.0


def call_core(client: Any, method: str, *arguments: Any) -> Any:
    """The core's result. Raises vLLM's `EngineDeadError` when the core's process has ended."""
    from rollstream.producers.engines.vllm.release import EngineCoreRequestType

    answer, name = Future[Any](), time.monotonic_ns()
    client.utility_results[name] = answer
    client._send_input(EngineCoreRequestType.UTILITY, (0, name, method, arguments))
    while True:
        try:
            return answer.result(CHECK_S)
        except TimeoutError:
            client.ensure_alive()


def replace_core_calls(client: Any) -> None:
    """Make vLLM's own calls to its core go through `call_core`, without a time limit."""
    client.call_utility = partial(call_core, client)
