"""From a URL to a bus: `sqlite:FOLDER` or `memory:`; a run on a cluster differs in this URL and the
store's only.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from streams.bus import Bus
from streams.errors import ConfigurationError
from streams.memory_bus import MemoryBus
from streams.sqlite_bus import SqliteBus


def open_bus(
    url: str,
    clock: Callable[[], float] = time.time,
    sync: Literal["normal", "full"] = "normal",
) -> Bus:
    """The bus at `url`; `clock` stamps records and measures leases, `sync="full"` survives power
    loss.
    """
    scheme, _, path = url.partition(":")
    if scheme == "sqlite" and path:
        return SqliteBus(Path(path), clock, sync=sync)
    if url == "memory:":
        return MemoryBus(clock)
    raise ConfigurationError(
        f"{url!r} is no bus that is known; known are sqlite:FOLDER and memory:"
    )
