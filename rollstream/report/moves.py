"""Repack moves as SVG arrows between the rows of a timeline. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from rollstream.monitor.moves import RequestMove

DRAWN_MAX = 2000  # newest moves drawn; more would merge into an area and take megabytes
ARROW_HALF_WIDTH = 3.5  # half the width of an arrowhead
PLAN_S = 0.05  # moves of one plan have nearly equal times and are drawn side by side


def move_arrows(
    moves: Sequence[RequestMove], places: Mapping[str, float], gap: float, x_of: Callable[[float], float]
) -> Iterator[str]:
    """Yields an arrow per move, from the edge of the source's row to the edge of the destination's.

    `places` maps a drawn row to the y of its middle; the edge is `gap` away from it. Moves of rows
    that are not drawn are left out.
    """
    drawn = [m for m in moves if {m.source, m.destination} <= places.keys()]
    last_s, x = float("-inf"), 0.0
    for move in drawn[-DRAWN_MAX:]:
        x = x_of(move.time_s) if move.time_s - last_s > PLAN_S else x + 1.5 * ARROW_HALF_WIDTH
        last_s = move.time_s
        begin, end = places[move.source], places[move.destination]
        down = 1.0 if end > begin else -1.0
        start, tip = begin + down * gap, end - down * gap
        foot = tip - down * 2 * ARROW_HALF_WIDTH
        word = "request" if move.requests == 1 else "requests"
        title = f"{move.source} handed {move.requests} {word} to {move.destination}"
        yield (
            f'<g class="move"><title>{escape(title)}</title>'
            f'<path class="shaft" d="M{x:.1f} {start:.1f}V{foot:.1f}"/>'
            f'<path d="M{x - ARROW_HALF_WIDTH:.1f} {foot:.1f}h{2 * ARROW_HALF_WIDTH:g}L{x:.1f} {tip:.1f}z"/></g>'
        )
