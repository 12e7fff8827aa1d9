"""vLLM's side of a hand-over, as one of its KV connectors (`KVConnectorBase_V1`).

Handing out is a call of ours between two steps: the request's whole blocks, as vLLM's own cache
manager has them at that moment, go to a file. Taking in is vLLM's: it asks how much of a request is
known elsewhere, and by then the file has been read and checked to its last byte, so that a promise
made can be kept. Each request takes in at most once: what it computes again later (preempted, or
after new weights) it computes itself.

Everything happens in the process of the scheduler, whose executor runs the worker there
(`connection.py`). The worker's part keeps no state, since vLLM has one per process for all engines.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportAttributeAccessIssue=false
# pyright: reportUnknownParameterType=false

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from producers.engines.vllm_engine.environment import installed
from producers.engines.vllm_engine.handover.caches import Caches, caches_of
from producers.engines.vllm_engine.handover.file import Front, encode_front, hash_of, read_body
from producers.engines.vllm_engine.handover.rules import blocks_of_use
from producers.engines.vllm_engine.handover.shelf import Shelf
from producers.engines.vllm_engine.handover.worker import CONNECTORS
from producers.engines.vllm_engine.release import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from streams.errors import StoreError
from streams.records import Version

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """Since the engine began. `refused` are files that were there and of no use."""

    handed_out: int = 0
    taken_in: int = 0
    tokens_in: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """A file that was read for a request; `blocks` of its blocks are the request's."""

    body: NDArray[np.uint8]
    blocks: int


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks of a body, from its `first` on, that go into these blocks of the cache."""

    caches: Caches
    body: NDArray[np.uint8]
    first: int
    blocks: Sequence[int]


@dataclass(slots=True)
class Loads(KVConnectorMetadata):
    """What the next step begins with."""

    loads: list[Load] = field(default_factory=list[Load])


class HandoverConnector(KVConnectorBase_V1, SupportsHMA):
    """The methods that vLLM calls, and those of `worker.py`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._caches: Caches | None = None
        self._requests: dict[str, Any] = {}  # by our key
        self._settled: set[str] = set()  # by vLLM's id: nothing more is taken in for it
        self._read: tuple[str, Read] | None = None  # for the request that is next
        self._loads: list[Load] = []
        self._counts = Counts()
        if role is KVConnectorRole.SCHEDULER:
            CONNECTORS[vllm_config.kv_transfer_config.engine_id] = self

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is not handed over is computed again

    # ---- ours ----------------------------------------------------------------------------------

    def hand_out(self, key: str, about: dict[str, Any]) -> int:
        """Of what is known of it there are in `about`: folder, cap, run, trajectory, versions."""
        try:
            return self._hand_out(key, about)
        except (StoreError, MemoryError, RuntimeError) as error:  # torch's, without memory
            log.debug("%s is not handed out: %s", key, error)
            return 0

    def counted(self) -> dict[str, int]:
        return asdict(self._counts)

    def _hand_out(self, key: str, about: dict[str, Any]) -> int:
        request, caches = self._requests.get(key), self._own()
        if request is None or caches is None or self._kv_cache_manager is None:
            return 0
        # What a step that is still under way computes is not there yet; the newest token has none.
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        count = min(computed, request.num_tokens - 1) // caches.block
        (mine,) = self._kv_cache_manager.get_block_ids(request.request_id)
        shelf = Shelf(Path(about["folder"]), about["bytes_max"])
        if count < 1 or len(mine) < count or count * caches.block_bytes > shelf.bytes_max:
            return 0
        body = caches.read(mine[:count])
        front = Front(
            run=about["run"],
            trajectory=about["trajectory"],
            versions=frozenset(Version(number, term) for number, term in about["versions"]),
            layout=caches.layout,
            block=caches.block,
            tokens=np.array(request.all_token_ids[: count * caches.block], np.uint32),
            body_bytes=count * caches.block_bytes,
            body_hash=hash_of(body),
        )
        shelf.put(shelf.path(front.trajectory), [encode_front(front), *body])
        self._counts.handed_out += 1
        return front.body_bytes

    def _own(self) -> Caches | None:
        if self._caches is None:
            release = installed() or ""
            self._caches = caches_of(self._vllm_config, self._kv_cache_config, release)
        return self._caches

    # ---- the scheduler's -----------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self._requests[_asked(request).get("key", request.request_id)] = request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Asked again and again until there are blocks for it."""
        found = self._found(request)
        caches = self._own()
        if found is None or caches is None:
            return 0, False
        return max(0, found.blocks * caches.block - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """It has its blocks, and begins."""
        asked = _asked(request)
        if "path" not in asked or request.request_id in self._settled:
            return
        found = self._found(request)
        self._settled.add(request.request_id)
        self._read = None
        Path(asked["path"]).unlink(missing_ok=True)
        if found is None or self._caches is None or num_external_tokens <= 0:
            return
        (mine,) = blocks.get_block_ids()
        first = found.blocks - num_external_tokens // self._caches.block
        self._loads.append(Load(self._caches, found.body, first, mine[first : found.blocks]))
        self._counts.taken_in += 1
        self._counts.tokens_in += num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        return Loads(loads)

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(_asked(request).get("key", request.request_id), None)
        self._settled.discard(request.request_id)
        if self._read is not None and self._read[0] == request.request_id:
            self._read = None
        return False, None

    def reset_cache(self) -> bool:
        return True  # files are of versions, not of what is loaded

    def _found(self, request: Any) -> Read | None:
        """Its file, if every byte of it is right."""
        asked, name = _asked(request), request.request_id
        if "path" not in asked or name in self._settled:
            return None
        if self._read is not None and self._read[0] == name:
            return self._read[1]
        found = self._checked(asked, request)
        if found is None:
            self._settled.add(name)
            self._counts.refused += 1
            Path(asked["path"]).unlink(missing_ok=True)
            log.debug("%s is computed anew: its KV is gone, or not what it was", asked["key"])
            return None
        self._read = name, found
        return found

    def _checked(self, asked: dict[str, Any], request: Any) -> Read | None:
        caches = self._own()
        read = read_body(Path(asked["path"]), asked["identity"])
        if caches is None or read is None:
            return None
        front, body = read
        count = len(front.tokens) // caches.block
        if (front.layout, front.block) != (caches.layout, caches.block):
            return None
        if len(body) != count * caches.block_bytes:
            return None
        wanted = np.array(request.prompt_token_ids, np.uint32)
        blocks = blocks_of_use(front.tokens, wanted, caches.block)
        return Read(body, blocks) if blocks else None

    # ---- the worker's --------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads), "what the scheduler's part made"
        for load in loads.loads:
            load.caches.write(load.body, load.first, load.blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """It is there."""

    def save_kv_layer(self, *arguments: Any, **kwargs: Any) -> None:
        """Nothing is saved while it runs."""

    def wait_for_save(self) -> None:
        """Nothing is."""


def _asked(request: Any) -> dict[str, Any]:
    return request.kv_transfer_params or {}
