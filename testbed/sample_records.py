"""One record of every schema, with every field set, and small trajectories of any length."""

import numpy as np

from rollstream.streams.records import (
    Admitted,
    Annotation,
    Applied,
    Assignment,
    Claim,
    Configured,
    Dead,
    GroupClosed,
    Opened,
    Partial,
    Prompt,
    Record,
    RelayStatus,
    RolloutStatus,
    StepDone,
    Superseded,
    Take,
    TakeFailed,
    TakeRetried,
    TakesRepeated,
    Trajectory,
    WeightsAnnounced,
)
from rollstream.streams.values import (
    Address,
    AnnotationUsed,
    GroupMembers,
    Member,
    Sampling,
    Span,
    Version,
)

TOKENS = np.array([5, 6, 150_000, 7], np.uint32)
SOURCES = np.array([0, 0, 1, 1], np.uint8)
LOGPROBS = np.array([-0.5, -1.25], np.float32)
SAMPLING = Sampling(0.7, 20, 0.95, 128, (1, 2))
V2, V3 = Version(2, 1), Version(3, 1)
SPANS = (Span(0, 1, V2), Span(1, 2, V3))
MEMBER = Member("g7.0", Address(1, 40), "00000000000000ff")


def trajectory(length: int = 4, group: int = 7) -> Trajectory:
    """`length` tokens, the first half of them the prompt."""
    generated = length - length // 2
    return Trajectory(
        f"g{group}.0", group, 0, 1, "remainder", "rollout-0", 2,
        np.arange(length, dtype=np.uint32),
        np.repeat(np.array([0, 1], np.uint8), [length // 2, generated]),
        np.linspace(-2, 0, generated, dtype=np.float32),
        (Span(0, generated, V2),), "stop", 1.0, V3, 10.5, 12.25,
    )  # fmt: skip


SAMPLES: tuple[Record, ...] = (
    Opened("trainer", 3),
    Prompt(7, "remainder", TOKENS, 8, SAMPLING, 42, '{"answer": "031"}', 1),
    Admitted(7, 2, ("g7.0", "g7.1"), 600.0, Address(0, 12)),
    Assignment(
        "resume", "g7.0", 7, 0, 2, "rollout-0", 1, V2, "remainder", TOKENS, SAMPLING, 42,
        "{}", Address(2, 9), 1, 2,
    ),
    Partial(
        "g7.0", 7, 2, "rollout-0", 1, Address(2, 9), 4, TOKENS, SOURCES, LOGPROBS, SPANS, "{}"
    ),
    RolloutStatus(
        "rollout-0", 1, 32, 30, 2, 4096, 8192, V2, True, "generating", 12, 812.5, 90_000, 0.25,
        100.5, 4000, 31,
    ),
    RelayStatus("relay-0", 1, "node-3", "http://node-3:9", (V2, V3), "relay-1", 100.5),
    Trajectory(
        "g7.0", 7, 0, 2, "remainder", "rollout-0", 1, TOKENS, SOURCES, LOGPROBS, SPANS, "dead",
        None, V3, 10.5, 12.25, 0.7, "reward raised", {"format": 0.5}, '{"turn": 2}', 1, 2,
    ),
    Annotation("g7.0", 7, "reference", LOGPROBS, "scorer-0"),
    WeightsAnnounced("run", V3, "weights/v3/manifest.json", "ab", "anchor", None, 1 << 20, 9.5),
    Applied("rollout-0", 1, V3, "cd", "hashes", 28, 0.125, 11.5),
    Configured("0123", "abc-dirty", 4, True),
    Take(
        4, 0, 1, (MEMBER,), (GroupMembers(7, (MEMBER,)),),
        (AnnotationUsed("g7.0", "reference", Address(0, 3), "0f"),),
    ),
    TakeRetried(4, 0, 1),
    TakeFailed(4, 0, (1, 2), "RuntimeError: out of memory"),
    Superseded(4, 0, (1, 2), (7,), "the learner failed 3 times on it"),
    TakesRepeated(4, 0, 1, (0, 1)),
    StepDone(4, V3, "ff", 2, {"loss": 0.5}, {"trained": 16}, 30.5),
    GroupClosed(9, "expired", "lag 5", 4),
    Dead("trajectories", 1, 40, "checksum differs", np.frombuffer(b"\x00junk", np.uint8)),
    Claim("blobs/trajectories/2026-11-21T13/0123", 2_000_000, "0123456789abcdef0123456789abcdef"),
)  # fmt: skip
