"""An agent's episode as a tree of its turns, for `inspect`."""

from collections.abc import Callable, Iterator, Sequence

from rollstream.streams.branches import branch_depths
from rollstream.streams.records import Trajectory
from rollstream.streams.values import Turn

# Characters of a turn's texts.
TEXT_MAX = 100


def episode_lines(record: Trajectory, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Returns lines per turn, indented by the number of forks on its path, and one about the
    episode.
    """
    lines: list[str] = []
    depths = branch_depths(record.turns, record.branches)
    for number, (turn, depth) in enumerate(zip(record.turns, depths, strict=True), start=1):
        lines += [f"{'   ' * depth}{line}" for line in _turn_lines(number, turn, record, decode)]
    waiting = sum(turn.waiting_s for turn in record.turns)
    generating = sum(turn.generating_s for turn in record.turns)
    causes = [turn.fork for turn in record.turns if turn.fork]
    forks = f" ({', '.join(sorted(set(causes)))})" if causes else ""
    abandoned = f", {len(record.abandoned)} abandoned" if record.abandoned else ""
    lines.append(
        f"{len(record.turns)} turns, {len(causes)} branches{forks}{abandoned}; "
        f"generating {generating:.2f} s, waiting {waiting:.2f} s"
    )
    return lines


def _turn_lines(
    number: int, turn: Turn, record: Trajectory, decode: Callable[[Sequence[int]], str]
) -> Iterator[str]:
    fork = f", a branch ({turn.fork})" if turn.fork else ""
    abandoned = ", abandoned: not trained" if number - 1 in record.abandoned else ""
    overridden = f", overridden: {', '.join(turn.overridden)}" if turn.overridden else ""
    yield (
        f"{number}. {turn.generated - turn.start} + {turn.end - turn.generated} tokens, "
        f"{turn.finish}, waited {turn.waiting_s:.2f} s, generated {turn.generating_s:.2f} s"
        f"{fork}{abandoned}{overridden}"
    )
    yield f"   > {_short(decode(record.tokens[turn.start : turn.generated].tolist()))}"
    yield f"   < {_short(decode(record.tokens[turn.generated : turn.end].tolist()))}"


def _short(text: str) -> str:
    line = text.replace("\n", "⏎")
    return line if len(line) <= TEXT_MAX else f"{line[: TEXT_MAX // 2]} … {line[-TEXT_MAX // 2 :]}"
