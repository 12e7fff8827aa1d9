"""The trainer's losses against the published ones: `loss_references` is the worst difference, over
all presets, of an update's loss and of its gradient with respect to the log-probabilities of its
tokens, from float64 loops written from the papers (`testbed/objectives/`); with a critic the values
of the tokens too.

The trainer computes in float32. The difference of the gradient is relative to its largest
component; that of the loss to the sum of the sizes of its parts, which nearly cancel.
"""

from collections.abc import Iterator
from itertools import chain

from benchmarks.case import Case, alone
from testbed.objectives.critic_updates import critic_differences
from testbed.objectives.further_policies import OBJECTIVES
from testbed.objectives.updates import all_differences, drawn_update

GOAL = 1e-6
SEEDS, SEEDS_QUICK = 10, 2
PARTS = (1, 5)
"""Numbers of micro-batches in which an update comes."""


def cases(quick: bool) -> Iterator[Case]:
    """Compares every preset on several drawn updates; the worst one counts."""
    found: list[tuple[float, str]] = []
    alone_worst = 0.0
    for seed in range(SEEDS_QUICK if quick else SEEDS):
        update = drawn_update(seed)
        for parts in PARTS:
            both = chain(all_differences(update, parts), critic_differences(seed, parts))
            for name, one in both:
                found.append((one.worst, name))
                alone_worst = max(alone_worst, one.loss_alone)
    value, name = max(found)
    presets = len(OBJECTIVES) + 1
    note = f"{name}; {presets} presets; a loss relative to itself alone {alone_worst:.1e}"
    yield alone("loss_references", value, "relative", at_most=GOAL, note=note)
