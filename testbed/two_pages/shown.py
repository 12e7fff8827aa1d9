"""Numbers as places show them (`ShownNumber`), and where they disagree (`disagreements`). Pure."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

# Beyond rounding as printed: sums of floats in another order.
RELATIVE = 1e-6
# Of a run that is not over these grow from one reading to the next, by seconds.
GROWING = {"run.elapsed_s": 30.0}
GAPS = "\u202f\u00a0\u2009 ,"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>[-−]?)"
    rf"(?:(?P<clock>\d+(?::\d\d)+)|(?P<plain>v?\d{{1,3}}(?:[{GAPS}]\d{{3}})+(?!\d)(?:\.\d+)?|v?\d+(?:\.\d+)?(?:e[-+−]?\d+)?))"
    rf"[{GAPS}]?(?P<unit>%|ms(?!\w)|µs|[kMGT]?B(?!\w)|[kMGT](?!\w))?"
)  # fmt: skip
_LARGE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SCALES = {
    **_LARGE, **{f"{letter}B": scale for letter, scale in _LARGE.items()},
    "%": 0.01, "ms": 1e-3, "µs": 1e-6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShownNumber:
    """A number at a place: `where` is its label or path there, `figure` its name in
    `rollstream/look/figures`, "" for a number without a name, `of` the step, group or other thing
    that it is of. `rounding` is half a unit of its last printed digit, 0 for a full float.
    """

    place: str
    where: str
    figure: str
    of: str
    number: float
    rounding: float = 0.0

    def agrees(self, other: "ShownNumber") -> bool:
        apart = abs(self.number - other.number)
        # The last digit may be rounded either way.
        most = 1.02 * (self.rounding + other.rounding) + GROWING.get(self.figure, 0.0)
        return apart <= most + RELATIVE * max(abs(self.number), abs(other.number), 1e-9)

    def text(self) -> str:
        return f"{self.place} ({self.where}) {self.number:.6g}"


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Two places that show different numbers for one figure."""

    figure: str
    of: str
    first: ShownNumber
    second: ShownNumber

    def text(self) -> str:
        of = f" of {self.of}" if self.of else ""
        return f"{self.figure}{of}: {self.first.text()} and {self.second.text()}"


def disagreements(shown: Iterable[ShownNumber]) -> list[Disagreement]:
    """Returns one disagreement per figure, thing and pair of places, in the order of figures."""
    by_name: defaultdict[tuple[str, str], list[ShownNumber]] = defaultdict(list)
    for one in shown:
        if one.figure:
            by_name[one.figure, one.of].append(one)
    apart: dict[tuple[str, str, str, str], Disagreement] = {}
    for (figure, of), numbers in sorted(by_name.items()):
        # The most exact number is what the others are held against.
        exact = min(numbers, key=lambda one: one.rounding)
        for other in numbers:
            if not exact.agrees(other):
                key = figure, of, exact.place, other.place
                apart.setdefault(key, Disagreement(figure, of, exact, other))
    return list(apart.values())


def unnamed(shown: Iterable[ShownNumber]) -> list[str]:
    """Returns the labels without a name, each with its place, once."""
    return sorted({f"{one.place}: {one.where}" for one in shown if not one.figure})


def numbers_of(text: str) -> list[tuple[float, float]]:
    """Returns the numbers of a text, each with half a unit of its last digit: `12 345`, `61%`,
    `1.2k`, `0:50`, `8.2 ms`, `v3`.
    """
    return list(_numbers_of(text.replace("−", "-")))


def _numbers_of(text: str) -> Iterator[tuple[float, float]]:
    for match in _NUMBER.finditer(text):
        sign = -1.0 if match["sign"] else 1.0
        if match["clock"]:
            seconds = 0.0
            for part in match["clock"].split(":"):
                seconds = 60 * seconds + int(part)
            # The live view rounds, the explorer cuts off.
            yield sign * seconds, 1.0
            continue
        scale = _SCALES[match["unit"] or ""]
        digits = match["plain"].lstrip("v").translate({ord(gap): None for gap in GAPS})
        mantissa, _, exponent = digits.partition("e")
        places = len(mantissa.partition(".")[2]) - int(exponent or 0)
        yield sign * scale * float(digits), scale * 0.5 * 10.0**-places


def shown_in(
    place: str, where: str, figures: Sequence[str], of: Sequence[str], text: str
) -> Iterator[ShownNumber]:
    """Yields the numbers of a text, which are of these figures in their order; a text with more or
    fewer numbers has no name.
    """
    numbers = numbers_of(text)
    if not numbers:
        return
    if len(numbers) != len(figures):
        yield ShownNumber(place, f"{where}: {text!r}", "", "", numbers[0][0])
        return
    things = list(of) if len(of) == len(figures) else [*of, ""][:1] * len(figures)
    for figure, thing, (number, rounding) in zip(figures, things, numbers, strict=True):
        yield ShownNumber(place, where, figure, thing, number, rounding)


def resolved(
    shown: Iterable[ShownNumber], ends: Mapping[str, tuple[str, str]]
) -> Iterator[ShownNumber]:
    """Yields the numbers with `first` and `last` replaced by the step or version that they name:
    `ends` has both for each figure.
    """
    for one in shown:
        if one.of in ("first", "last") and one.figure in ends:
            of = ends[one.figure][one.of == "last"]
            yield ShownNumber(one.place, one.where, one.figure, of, one.number, one.rounding)
        else:
            yield one
