"""The cards of a page: tiles with large numbers, charts, tables. A label opens the definition of
its figure; an element with numbers names them, in their order, in `data-figure`, and of what they
are in `data-of`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollstream.look.figures.definitions import figure_of
from rollstream.look.report.chart import COLUMNS, Chart, draw_chart
from rollstream.look.report.elements import Node, PageElement, element


@dataclass(frozen=True, slots=True)
class Detail:
    """How much of a long run is drawn: columns of a chart, bars and marks of a timeline, lines of a
    table.
    """

    columns: int = COLUMNS
    marks: int = 1600
    lines: int = 200

    def half(self) -> "Detail":
        return Detail(self.columns // 2, self.marks // 2, self.lines // 2)


FULL_DETAIL = Detail()


@dataclass(frozen=True, slots=True)
class Tile:
    """A large number, or several of one figure: `figures` names them in the order of `value`, `of`
    says of what they are (`first last`: of the first and last one that has it). The label is that
    of the first figure, unless the tile has its own. `href` is a fragment of the explorer.
    """

    figures: str
    value: str
    of: str = ""
    label: str = ""
    href: str = ""


def heading(title: str, *lines: str) -> PageElement:
    notes = (element("p", {"class": "note"}, line) for line in lines if line)
    words = element("div", {}, element("h1", {}, title), *notes)
    return element("header", {"class": "page-head"}, words)


def tiles(shown: Sequence[Tile]) -> PageElement:
    return element("dl", {"class": "tiles"}, *map(_tile, shown))


def _tile(tile: Tile) -> PageElement:
    label = tile.label or figure_of(tile.figures.split()[0]).label
    return element(
        "div",
        {"class": "tile"},
        element("dt", {}, defined_label(label, tile.figures)),
        element("dd", named(tile.figures, tile.of), linked(tile.value, tile.href)),
    )


def named(figures: str, of: str = "") -> Mapping[str, str]:
    """Returns the attributes of an element that shows the numbers of these figures."""
    return {"data-figure": figures, "data-of": of if figures else ""}


def linked(content: Node, href: str) -> Node:
    return element("a", {"href": href, "class": "row-link"}, content) if href else content


def defined_label(label: Node, figures: str) -> Node:
    """Returns a label that opens the definitions of its figures; without figures a plain one."""
    if not figures:
        return label
    names = dict.fromkeys(figures.split())
    lines = [figure_of(name).definition for name in names]
    if len(names) > 1:
        labels = [figure_of(name).label for name in names]
        lines = [f"{word}: {line}" for word, line in zip(labels, lines, strict=True)]
    meanings = (element("p", {}, line) for line in lines)
    return element("details", {"class": "figure"}, element("summary", {}, label), *meanings)


def charts(drawn: Sequence[Chart], detail: Detail) -> list[PageElement]:
    cards = [chart_card(chart, detail) for chart in drawn if not chart.is_empty()]
    return [element("div", {"class": "grid"}, *cards)] if cards else []


def chart_card(chart: Chart, detail: Detail) -> PageElement:
    note = chart.note
    if chart.is_thinned(detail.columns):
        note += f"; the extremes of {detail.columns} parts are drawn"
    figures = " ".join(dict.fromkeys(line.figure for line in chart.series if line.figure))
    legend = [_legend(chart)] if len(chart.series) > 1 else []
    return card(chart.title, note, *legend, draw_chart(chart, detail.columns), figures=figures)


def _legend(chart: Chart) -> PageElement:
    items = (
        element(
            "li",
            {},
            element("i", {"class": f"swatch line c{line.colour}{' dash' if line.thin else ''}"}),
            line.name,
        )
        for line in chart.series
        if line.points
    )
    return element("ul", {"class": "legend"}, *items)


def card(title: str, note: str, *content: Node, figures: str = "") -> PageElement:
    words: list[Node] = [defined_label(element("h2", {}, title), figures)]
    words += [element("p", {"class": "note"}, note)] if note else []
    head = element("header", {"class": "card-head"}, element("div", {}, *words))
    return element("section", {"class": "card", "aria-label": title}, head, *content)


def folded(title: str, content: Node) -> PageElement:
    inside = element("details", {"class": "folded"}, element("summary", {}, title), content)
    return element("section", {"class": "card", "aria-label": title}, inside)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Node | int]],
    figures: Sequence[str] = (),
    links: Sequence[str] = (),
) -> PageElement:
    """Returns a table; columns of integers are right-aligned. `figures` names what each column
    shows, "" for a column without numbers; of a row they are those of its first cell. `links` are
    the explorer's fragments of the rows.
    """
    numeric = ["n" if _is_numeric([row[i] for row in rows]) else "" for i in range(len(head))]
    figures = figures or [""] * len(head)
    heads = (
        element("th", {"class": kind, "scope": "col"}, defined_label(label, figure))
        for label, figure, kind in zip(head, figures, numeric, strict=True)
    )
    body: list[PageElement] = []
    for at, row in enumerate(rows):
        link = links[at] if links else ""
        cells = (
            element(
                "td",
                {"class": kind, **named(figure, "" if figure.startswith("run.") else str(row[0]))},
                linked(_cell(value), "" if column else link),
            )
            for column, (value, figure, kind) in enumerate(zip(row, figures, numeric, strict=True))
        )
        body.append(element("tr", {}, *cells))
    content = (
        element("thead", {}, element("tr", {}, *heads)),
        element("tbody", {}, *body),
    )
    return scrolled("table-box fit", ", ".join(filter(None, head)), element("table", {}, *content))


def scrolled(kind: str, label: str, content: Node) -> PageElement:
    """Returns a box that scrolls where the page is narrow, also by keys."""
    region = {"class": kind, "tabindex": "0", "role": "region", "aria-label": label}
    return element("div", region, content)


def _is_numeric(column: Sequence[Node | int]) -> bool:
    spans = all(isinstance(cell, PageElement) and cell.tag == "span" for cell in column)
    return spans or all(isinstance(cell, int) for cell in column)


def _cell(value: Node | int) -> Node:
    return group_digits(value) if isinstance(value, int) else value


def group_digits(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
