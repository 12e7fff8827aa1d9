"""The world of the benchmark `hex`: a run of `examples/longtail.toml` whose rollouts are on three
unlike kinds of cards.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rollstream.run.sizes.devices import ACCELERATORS

WARM = 4  # steps; two are one pass over the prompts, after which lengths are known
KINDS: Mapping[str, int] = {"H100": 1, "L40S": 2, "L4": 3}
"""Rollouts of each kind of card, the fastest first: `rollstream run` starts those of the first."""
WORLD = (
    "trainer.steps=40", "trainer.groups_per_step=64", "task.options.prompts=128",
    "dispatch.max_lag=4", "paced.weights_bytes=20000000", "paced.time_scale=4",
)  # fmt: skip
MODEL_BYTES, KV_TOKEN_BYTES, MEMORY_SHARE = 15.2e9, 57_344, 0.9
SHARES = 2.7 / 3.35, 6e14 / 989e12
"""Shares of its peak bandwidth and arithmetic that a card reaches: those of the example's H100."""


@dataclass(frozen=True, slots=True)
class Arm:
    """The measured steps of one run: trained tokens per second, and samples per step that were too
    old to be trained.
    """

    tokens_per_s: float
    dropped: float


def kv_tokens(kind: str) -> int:
    """Returns the tokens that a card caches beside the weights."""
    free = ACCELERATORS[kind].memory * MEMORY_SHARE - MODEL_BYTES
    return int(free / KV_TOKEN_BYTES)


def settings_of(kind: str) -> tuple[str, ...]:
    """Returns the settings of a machine with this card: its bandwidth, arithmetic and memory."""
    card = ACCELERATORS[kind]
    return (
        f"rollouts.count={KINDS[kind]}",
        f"paced.roofline.bandwidth={card.bandwidth * SHARES[0]:.4g}",
        f"paced.roofline.flops={card.flops * SHARES[1]:.4g}",
        f"paced.kv_tokens={kv_tokens(kind)}",
    )
