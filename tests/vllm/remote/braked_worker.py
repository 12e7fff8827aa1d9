"""The worker class of a test's server: the product's extension, and a brake. A server continues by
itself between two polls; while the file `BRAKE` exists a step waits for the time in it, so that a
request is surely in its middle when a test acts on it.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from rollstream.producers.engines.vllm.remote.worker import ServerWorker
from testbed.waiting import let_pass

BRAKE = Path(os.environ["BRAKE"])
assert issubclass(CPUWorker, Worker), "whose step is what is braked"
step = Worker.execute_model  # pyright: ignore[reportAttributeAccessIssue]


def braked(self: Worker, *args: Any, **options: Any) -> Any:
    """One step."""
    with suppress(FileNotFoundError, ValueError):  # not set yet, or being written
        let_pass(float(BRAKE.read_text()))
    return step(self, *args, **options)


Worker.execute_model = braked  # pyright: ignore[reportAttributeAccessIssue]


class BrakedWorker(ServerWorker):
    """As the product's."""
