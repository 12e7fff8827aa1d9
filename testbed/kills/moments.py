"""The moments at which a run under kills is aimed: the write that a process makes when it dies."""

from collections.abc import Mapping, Sequence

TRAINER, DISPATCH = "trainer", "dispatch"
FILL = "fill history"  # insertion into the draft history, by any rollout
VERSION, CHECKPOINT = "weights/vN-tN", "checkpoints/sN-tN"

Writes = Sequence[tuple[str, str]]
"""Processes and kinds of write, as `aims.py` names them."""

MOMENTS: Mapping[str, Writes] = {
    "checkpoint": [
        (TRAINER, f"create {CHECKPOINT}/state-N-of-N.safetensors"),
        (TRAINER, f"create {CHECKPOINT}/state.json"),
        (TRAINER, f"create {CHECKPOINT}/manifest.json"),
        (TRAINER, f"delete {CHECKPOINT}/manifest.json"),
    ],
    "version publish": [
        (TRAINER, f"create {VERSION}/manifest.json"),
        (TRAINER, "swap weights/latest.json"),
        (TRAINER, "append weights"),
        (TRAINER, f"delete {VERSION}/manifest.json"),
    ],
    "ledger write": [(TRAINER, "append ledger")],
    "truncation": [
        *((TRAINER, f"truncate {topic}") for topic in ("admissions", "trajectories", "ledger")),
        (TRAINER, "commit truncated trajectories"),
        *((DISPATCH, f"truncate {topic}") for topic in ("prompts", "assignments", "partials")),
    ],
    "compaction": [("rollout-0", "append status"), (TRAINER, "append weights")],
    "insertion into the history of drafts": [("rollout-0", FILL)],
}
"""With SQLite, an append to a compacted topic compacts it."""
EMBEDDED_ONLY = ("truncation", "compaction")
"""A broker compacts by itself, and a run whose archive is in a bucket truncates nothing here."""
