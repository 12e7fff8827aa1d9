"""Questions to vLLM's core in a process of its own, which end when it dies.

vLLM 0.32 waits for ever if its core dies after it was asked (`call_utility`): nobody fails what is
pending. A rollout that hangs there would neither generate nor be started again. So every question
of vLLM's client goes through `ask`, which looks at the core's life while it waits.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

import time
from concurrent.futures import Future
from functools import partial
from typing import Any

LOOK_S = 1.0


def ask(client: Any, wait_s: float, method: str, *arguments: Any) -> Any:
    """What the core answers; `TimeoutError` when it did not in time, vLLM's `EngineDeadError` when
    it ended.
    """
    from producers.engines.vllm_engine.release import EngineCoreRequestType

    answer, name = Future[Any](), time.monotonic_ns()
    client.utility_results[name] = answer
    client._send_input(EngineCoreRequestType.UTILITY, (0, name, method, arguments))
    end = time.monotonic() + wait_s
    while True:
        try:
            return answer.result(max(0.0, min(LOOK_S, end - time.monotonic())))
        except TimeoutError:
            client.ensure_alive()
            if time.monotonic() >= end:
                raise


def ask_from_now_on(client: Any) -> None:
    """Whatever vLLM itself asks goes through `ask` too, for as long as it takes."""
    client.call_utility = partial(ask, client, float("inf"))
