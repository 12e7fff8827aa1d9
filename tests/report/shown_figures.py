"""Reads what a page shows from its HTML, without a browser: cards with their notes, tables, curves
and timelines. `figures` names each value as `figures.json` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

EMPTY = ("meta", "link", "br")


@dataclass
class ShownNode:
    tag: str
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    children: list["ShownNode | str"] = field(default_factory=list["ShownNode | str"])

    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text() for c in self.children)

    def all(self, tag: str, kind: str = "") -> list["ShownNode"]:
        """Every element of this tag inside, with this class."""
        found = [node for child in self.children if isinstance(child, ShownNode)
                 for node in (child, *child.all("", ""))]  # fmt: skip
        return [
            node
            for node in found
            if (not tag or node.tag == tag)
            and (not kind or kind in node.attributes.get("class", "").split())
        ]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [ShownNode("page")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = ShownNode(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in EMPTY:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(ShownNode(tag, {name: v or "" for name, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in EMPTY:
            assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read_page(html: str) -> ShownNode:
    """The tree of a page, whose elements must all be closed."""
    reader = _Reader()
    reader.feed(html)
    (page,) = reader.open
    return page


def figures(page: ShownNode) -> Iterator[tuple[str, str, str]]:
    """Yields card, name and value of everything that the page shows."""
    (main,) = page.all("main")
    head = main.all("header", "page-head")[0]
    yield from (("heading", "h1", node.text()) for node in head.all("h1"))
    yield from (("heading", "line", node.text()) for node in head.all("p"))
    for tile in main.all("div", "tile"):
        yield "tiles", _label(tile.all("dt")[0]), tile.all("dd")[0].text()
    for card in main.all("section", "card"):
        name = card.attributes["aria-label"]
        yield from ((name, "note", node.text()) for node in card.all("p", "note"))
        for table in card.all("table"):
            heads = [_label(head) for head in table.all("th")]
            for row in table.all("tbody")[0].all("tr"):
                cells = row.all("td")
                for head, cell in zip(heads, cells, strict=True):
                    yield name, f"{_label(cells[0])} | {head}", _label(cell)
        for svg in card.all("svg"):
            yield from ((name, what, value) for what, value in _drawn(svg))


def _label(node: ShownNode) -> str:
    """A label without the definition that it opens."""
    summaries = node.all("summary")
    return (summaries[0] if summaries else node).text().strip()


def _drawn(svg: ShownNode) -> Iterator[tuple[str, str]]:
    yield from (("last value", node.text()) for node in svg.all("text", "value"))
    yield from (("row", node.text()) for node in svg.all("text", "label"))
    yield from (("note of row", node.text()) for node in svg.all("text", "tick"))
    yield from (("title", node.text()) for node in svg.all("title"))
    for path in svg.all("path"):
        if "data-name" in path.attributes:
            series = path.attributes["data-name"]
            xs, ys = (path.attributes[name].split() for name in ("data-x", "data-y"))
            yield f"{series}: points", str(len(xs))
            yield from ((f"{series}: {x}", y) for x, y in zip(xs, ys, strict=True))
