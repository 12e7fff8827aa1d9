"""Defines the records of the topic `status`, the heartbeats of rollouts and relays; `records.py`
re-exports them.
"""

from typing import Literal

from rollstream.streams.values import RecordStruct, Version


class RolloutStatus(RecordStruct, tag="rollout_status/1"):
    """The present state of a rollout, sent repeatedly as its heartbeat. Key: rollout and term.

    Load: at most `slots` trajectories run together; `running` do, and `waiting` wait, of which
    `queued` were not submitted to the engine yet. `kv_used` and `kv_capacity` are tokens of the KV
    cache, `kv_previous` is `kv_used` at the previous report. `decode_batch_max` is B_max, the
    largest batch at which another row is nearly free in a decode step. `tokens_total` counts
    generated tokens; `busy_s` is CPU time in prefill and decode, `idle_s` time with nothing to
    decode, all since the rollout's start. `parked` trajectories wait for their environment or
    program without a slot; dispatch assigns as many more, up to `parked_max`.

    Weights: it serves `version`, the newest of its `versions` if it serves adapters side by side
    (else `versions` is empty). `verified` is False while the engine was found to serve other
    tensors, until they are repaired. `quota_left`: under `keep_version`, how many new trajectories
    it may start under `version` although a newer one exists. `pulling`: it changes to other weights
    as soon as they have arrived.

    `health` is `draining` while the rollout only finishes its work before it takes a newer version,
    `pulling` while it has no work and waits for weights, `leaving` if it accepts no more work.
    `preemptible`: its machine may be taken away at any moment. `stalled_s`: seconds since the last
    iteration of its loop, if a thread repeats this status because the loop sends none; the other
    fields are then those of that iteration. `url` is the address of its endpoint for agents, "" if
    it has none.
    """

    rollout: str
    term: int
    slots: int
    running: int
    waiting: int
    kv_used: int
    kv_capacity: int
    version: Version
    verified: bool
    health: Literal["starting", "generating", "draining", "pulling", "leaving"]
    quota_left: int
    tokens_per_s: float
    tokens_total: int
    idle_s: float
    time_s: float
    kv_previous: int = 0
    decode_batch_max: int = 0
    busy_s: float = 0.0
    pulling: bool = False
    queued: int = 0
    preemptible: bool = False
    stalled_s: float = 0.0
    versions: tuple[Version, ...] = ()
    parked: int = 0
    parked_max: int = 0
    url: str = ""

    @property
    def held(self) -> set[Version]:
        """Returns all versions that the rollout serves."""
        return {self.version, *self.versions}


class RelayStatus(RecordStruct, tag="relay_status/1"):
    """The present state of a relay, sent repeatedly as its heartbeat. Key: relay and term. `node`
    is its host, `url` its address ("" once it is leaving), and `versions` are those that it holds
    completely. `upstream` is the relay that it reads from, as name/term; `bucket`: the store.
    `site` is where it stands, if the run has several sites.
    """

    relay: str
    term: int
    node: str
    url: str
    versions: tuple[Version, ...]
    upstream: str
    time_s: float
    site: str = ""
