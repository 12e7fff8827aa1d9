"""Moves between rollouts as arrows over the rows of a timeline. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from rollstream.live.moves import Moved

DRAWN_MAX = 2000  # the last ones: more are a grey area, and megabytes
HEAD = 3.5  # half the width of an arrowhead
PLAN_S = 0.05  # moves of one plan are noted together: they stand side by side


def arrows(
    moves: Sequence[Moved], places: Mapping[str, float], gap: float, x_of: Callable[[float], float]
) -> Iterator[str]:
    """From the edge of the row that gave to the edge of the one that took, both `gap` from their
    middles in `places`; moves of rows that are not drawn are left out.
    """
    drawn = [m for m in moves if {m.source, m.destination} <= places.keys()]
    last_s, x = float("-inf"), 0.0
    for move in drawn[-DRAWN_MAX:]:
        x = x_of(move.time_s) if move.time_s - last_s > PLAN_S else x + 1.5 * HEAD
        last_s = move.time_s
        begin, end = places[move.source], places[move.destination]
        down = 1.0 if end > begin else -1.0
        start, tip = begin + down * gap, end - down * gap
        foot = tip - down * 2 * HEAD
        word = "request" if move.requests == 1 else "requests"
        title = f"{move.source} handed {move.requests} {word} to {move.destination}"
        yield (
            f'<g class="move"><title>{escape(title)}</title>'
            f'<path class="shaft" d="M{x:.1f} {start:.1f}V{foot:.1f}"/>'
            f'<path d="M{x - HEAD:.1f} {foot:.1f}h{2 * HEAD:g}L{x:.1f} {tip:.1f}z"/></g>'
        )
