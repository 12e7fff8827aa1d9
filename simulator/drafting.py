"""Simulates drafts from history (docs/explanation/drafts.md): tokens and time of a decode pass, as
pure functions.
"""

from dataclasses import dataclass, field

from rollstream.producers.drafts.planner import expected_gain
from rollstream.producers.engines.roofline import Roofline


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The share `found` of the look-ups finds a draft of at most `longest` tokens; each is accepted
    with probability `rate` if all before it are. A look-up takes `lookup_s` seconds of every row in
    every pass. `gains[d]` is the expected number of accepted tokens of d.
    """

    found: float
    rate: float
    lookup_s: float = 0.0
    longest: int = 32
    gains: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        gains = (expected_gain(self.rate, length) for length in range(self.longest + 1))
        object.__setattr__(self, "gains", tuple(gains))


def drafted_roofline(
    roofline: Roofline, rows: int, kv_tokens: float, known_share: float, model: DraftModel
) -> Roofline:
    """Returns times of a step that yields one token of each of `rows` rows, of which the share
    `known_share` has a history: a fraction of a pass with drafts of the best length, or `roofline`
    if no draft is faster, as in the service.
    """
    share = model.found * known_share
    if share <= 0:
        return roofline
    length = _best_length(roofline, rows, kv_tokens, share, model)
    tokens, verified = 1 + share * model.gains[length], 1 + share * length
    # The model computes every drafted token, so a pass has the arithmetic of that many more rows;
    # it reads weights and KV cache once.
    drafted = Roofline(
        roofline.weights_s / tokens,
        roofline.kv_token_s / tokens,
        roofline.row_s * verified / tokens,
        (roofline.overhead_s + rows * model.lookup_s) / tokens,
        roofline.prefill_token_s,
        roofline.overlapping,
    )
    is_faster = drafted.step_s(rows, kv_tokens) < roofline.step_s(rows, kv_tokens)
    return drafted if is_faster else roofline


def _best_length(
    roofline: Roofline, rows: int, kv_tokens: float, share: float, model: DraftModel
) -> int:
    reading = roofline.weights_s + kv_tokens * roofline.kv_token_s
    fixed = roofline.overhead_s + rows * model.lookup_s
    row_s, gains, overlapping = rows * roofline.row_s, model.gains, roofline.overlapping

    def pass_s(length: int) -> float:
        computing = (1 + share * length) * row_s
        longer = max(reading, computing) if overlapping else reading + computing
        return longer + fixed

    # By bisection: gains are concave and times convex in the length, so the speed has one maximum.
    few, many = 1, model.longest
    while few < many:
        middle = (few + many) // 2
        next_gain = (1 + share * gains[middle + 1]) * pass_s(middle)
        if next_gain > (1 + share * gains[middle]) * pass_s(middle + 1):
            few = middle + 1
        else:
            many = middle
    return few
