"""Packs samples into micro-batches: one `Take` names each, and one worker trains it. Pure and
deterministic.
"""

from collections.abc import Sequence

from rollstream.consumers.trainer.data.sample_part import Sample


def pack_micro_batches(samples: Sequence[Sample], tokens_max: int) -> list[tuple[Sample, ...]]:
    """Micro-batches of at most `tokens_max` tokens (one longer sample is a micro-batch of its own).

    Every sample is in exactly one micro-batch. Samples are ordered longest first, then by
    trajectory id, so neighbours have about equal lengths and the result does not depend on the
    order of `samples`. Micro-batches have about equal numbers of tokens, so parallel workers finish
    together.
    """
    if not samples:
        return []
    ordered = sorted(samples, key=lambda s: (-len(s), s.trajectory))
    total = sum(len(s) for s in ordered)
    share = total / -(-total // tokens_max)
    batches: list[list[Sample]] = [[]]
    tokens = before = 0
    for sample in ordered:
        is_full = tokens + len(sample) > tokens_max or before + tokens >= share * len(batches)
        if batches[-1] and is_full:
            batches.append([])
            before, tokens = before + tokens, 0
        batches[-1].append(sample)
        tokens += len(sample)
    return [tuple(batch) for batch in batches]
