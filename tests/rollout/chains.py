"""The content of one chain of partials."""

from rollstream.errors import DecodeError
from rollstream.producers.rollout.chain import ChainContent, ChainRequest, read_chains
from rollstream.streams.bus import Bus
from rollstream.streams.values import Address


def read_chain(bus: Bus, newest: Address, trajectory: str) -> ChainContent:
    found = read_chains(bus, [ChainRequest(trajectory, newest)])[trajectory]
    if isinstance(found, DecodeError):
        raise found
    return found
