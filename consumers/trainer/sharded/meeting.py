"""Rendezvous: the key-value store through which ranks find each other's addresses, new for every
start.

`torchrun` keeps one store of its own through all restarts of its processes (torch 2.13), so entries
of the previous start are still in it, and gloo would connect to addresses of dead processes. The
ranks therefore read a single entry from it, the port of rank 0's own store, and retry until that
port accepts a connection.
"""

# pyright: reportUnknownMemberType=false

import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from rollstream.consumers.trainer.sharded.rank_environment import rank_of

PORT_KEY = "rollstream/port"
CONNECT_S = 1.0
PAUSE_S = 0.1


def rendezvous_store(timeout_s: float, environment: Mapping[str, str] = os.environ) -> TCPStore:
    """The store of this start; `RuntimeError` if rank 0 does not open it in time."""
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    rank, timeout = rank_of(environment), timedelta(seconds=timeout_s)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return TCPStore(host, port, None, rank == 0, timeout, wait_for_workers=False)
    kept = TCPStore(host, port, None, False, timeout)
    if rank == 0:
        own = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
        kept.set(PORT_KEY, str(own.port))
        return own
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        now = int(kept.get(PORT_KEY))
        try:
            socket.create_connection((host, now), CONNECT_S).close()
        except OSError:  # of a start before this one
            time.sleep(PAUSE_S)
            continue
        return TCPStore(host, now, None, False, timeout)
    raise RuntimeError(f"rank 0 did not open its store at {host} within {timeout_s:g} s")
