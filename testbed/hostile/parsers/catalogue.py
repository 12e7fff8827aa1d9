"""Lists the parsers that are fuzzed (`fuzzed_parsers`)."""

import torch

from rollstream.storage.weights.publish import NewVersion, publish_version
from rollstream.streams.values import Version
from testbed.hostile.parsers.agents import agent_parsers
from testbed.hostile.parsers.files import file_parsers
from testbed.hostile.parsers.parser import FuzzedParser
from testbed.hostile.parsers.stores import store_parsers, weights_parser
from testbed.hostile.parsers.texts import text_parsers
from testbed.memory import MemoryStore


def _weights() -> MemoryStore:
    """A store with an anchor and a version of sparse and dense deltas."""
    store, first = MemoryStore(), {"a": torch.arange(64.0), "b": torch.ones(3, 4)}
    second = {"a": first["a"] + (torch.arange(64) == 3), "b": torch.zeros(3, 4)}
    files = {"config.json": b"{}"}
    new = NewVersion("r", Version(0, 1), first, files, 1 << 20, 0.0)
    anchor = publish_version(store, new)
    new = NewVersion("r", Version(1, 1), second, {}, 1 << 20, 0.0)
    publish_version(store, new, anchor, first, anchor_due=False)
    return store


def fuzzed_parsers() -> dict[str, FuzzedParser]:
    """Returns all parsers by their names."""
    parsers = [*text_parsers(), *store_parsers(), *agent_parsers(), *file_parsers()]
    parsers.append(weights_parser(_weights()))
    by_name = {parser.name: parser for parser in parsers}
    assert len(by_name) == len(parsers)
    return by_name
