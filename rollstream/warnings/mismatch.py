"""Warnings about engine and trainer that compute different log-probabilities for the same tokens
under the same version. Pure; each threshold carries its arithmetic, `docs/learning.md` the causes.
"""

from collections.abc import Iterator

from rollstream.live.snapshot import Snapshot
from rollstream.live.words import count, plain_text
from rollstream.warnings.concern import Concern

TOKENS_MIN = 256
"""|Δ| spreads by about its mean, so the mean of 256 is known to 6 %."""
EXACT_NATS = 1e-3
"""Mean |Δ| where everything is float32: rounding alone is below 1e-4 (vLLM: at most 5e-5)."""
ROUNDED_NATS = 0.05
"""Mean |Δ| where something has 16 bits. bfloat16 keeps 8 bits: a logit of 16 is stored to 0.06,
off by 0.016 on average, and log-probabilities of such logits by about as much; three times that.
"""
NEAR_NATS = 0.5
"""For each step of lag: |Δ| holds what was learnt in between, 0.03 to 0.14 a step in the quickstart
from a model that was hardly warm. Other weights are off by several nats.
"""
DO = (
    "likely causes, in this order: the engine's log-probabilities are not at sampling.temperature "
    "or are of a filtered distribution; it serves other weights than it says (rollstream audit) or "
    "blocks of a prefix cache of other weights; the output head has 16 bits on one side "
    "(rollouts.vllm.head_float32); see docs/learning.md"
)


def mismatch(at: Snapshot) -> Iterator[Concern]:
    """By task; at another lag only what no training explains."""
    bound = EXACT_NATS if at.plan.is_float32 else ROUNDED_NATS
    for task, found in at.mismatch.items():
        name = plain_text(task, 40)
        if found.tokens >= TOKENS_MIN and found.mean > bound:
            what = (
                f"engine and trainer are {found.mean:.2g} nats apart on average (bound: {bound:g}) "
                f"for the same {count(found.tokens)} tokens of task {name} under the same version; "
                f"KL {found.kl:.2g}, largest {found.largest:.2g}"
            )
        elif found.near_lag is not None and found.near_mean > NEAR_NATS * found.near_lag:
            what = (
                f"engine and trainer are {found.near_mean:.2g} nats apart on average for tokens of "
                f"task {name} at lag {found.near_lag}, more than training explains (the last step "
                "had none of lag 0)"
            )
        else:
            continue
        yield Concern(f"mismatch/{name}", what, DO)


CHECKS = (mismatch,)
