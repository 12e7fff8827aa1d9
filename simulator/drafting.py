"""Simulates drafts from history (docs/explanation/drafts.md): how many tokens a decode pass yields,
and how long it takes.

`DraftModel` states how often a draft is found and how likely each of its tokens is accepted;
`drafted_roofline` chooses the draft length that generates most, as the service's planner does, and
returns the times of a step that yields one token of each row. All functions are pure.
"""

from dataclasses import dataclass, field, replace

from rollstream.producers.drafts.planner import expected_gain
from rollstream.producers.engines.roofline import Roofline


@dataclass(frozen=True, slots=True)
class DraftModel:
    """States how drafts fare: the share `found` of the look-ups finds one, and each drafted token
    is accepted with probability `rate` if all before it are. A look-up takes `lookup_s` seconds of
    every row in every pass; a draft has at most `longest` tokens. `gains[d]` is the expected number
    of accepted tokens of a draft of d tokens.
    """

    found: float
    rate: float
    lookup_s: float = 0.0
    longest: int = 32
    gains: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        gains = (expected_gain(self.rate, length) for length in range(self.longest + 1))
        object.__setattr__(self, "gains", tuple(gains))


@dataclass(frozen=True, slots=True)
class DraftPass:
    """One decode pass with drafts of `length` tokens: `tokens` is the expected number that it
    yields per row, `seconds` its duration.
    """

    length: int
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def drafted_roofline(
    roofline: Roofline, rows: int, kv_tokens: float, known: float, model: DraftModel
) -> Roofline:
    """Returns the times of a step that yields one token of each of `rows` rows, of which the share
    `known` has a history: a fraction of a pass with drafts of the best length, or `roofline` itself
    where no length is faster than no draft, as the gate of the service decides.

    The model computes every drafted token, so a pass has the arithmetic of that many more rows; it
    reads weights and KV cache once.
    """
    share = model.found * known
    chosen = _best_pass(roofline, rows, kv_tokens, share, model) if share > 0 else None
    if chosen is None or chosen.speed * roofline.step_s(rows, kv_tokens) <= 1:
        return roofline
    return replace(
        roofline,
        weights_s=roofline.weights_s / chosen.tokens,
        kv_token_s=roofline.kv_token_s / chosen.tokens,
        row_s=roofline.row_s * (1 + share * chosen.length) / chosen.tokens,
        overhead_s=(roofline.overhead_s + rows * model.lookup_s) / chosen.tokens,
    )


def _best_pass(
    roofline: Roofline, rows: int, kv_tokens: float, share: float, model: DraftModel
) -> DraftPass:
    """Returns the fastest pass by bisection: gains are concave and times convex in the length, so
    the speed rises up to its maximum and falls behind it.
    """

    def of(length: int) -> DraftPass:
        tokens = 1 + share * model.gains[length]
        verified = rows * (1 + share * length)
        reading, computing = (
            roofline.weights_s + kv_tokens * roofline.kv_token_s,
            verified * roofline.row_s,
        )
        longer = max(reading, computing) if roofline.overlapping else reading + computing
        return DraftPass(length, tokens, longer + roofline.overhead_s + rows * model.lookup_s)

    few, many = 1, model.longest
    while few < many:
        middle = (few + many) // 2
        if of(middle + 1).speed > of(middle).speed:
            few = middle + 1
        else:
            many = middle
    return of(few)
