"""Parts of a page (`PageElement`): written as HTML (`html_of`), or sent as JSON to the explorer's
page, which makes the same nodes of them. Texts of a run are hostile: they never become markup, and
characters that are invisible or change the direction of text become visible marks.
"""

import re
from collections.abc import Mapping
from html import escape
from typing import NamedTuple

# As in `text.js` of the explorer: C0 but newline, DEL and C1, soft hyphen, marks of direction,
# characters without width, interlinear marks, halves of surrogate pairs, tags.
_UNSEEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ufffd\ud800-\udfff\U000e0000-\U000e007f]"
)
# Their text is no HTML, so a mark is part of it.
_TEXT_ONLY = ("title", "text")
_DRAWN = ("path", "rect")


class PageElement(NamedTuple):
    """Encoded as `[tag, {attribute: value}, [child, …]]`; a child is an element or a text."""

    tag: str
    attributes: Mapping[str, str]
    children: "tuple[Node, ...]"


Node = PageElement | str


def element(tag: str, attributes: Mapping[str, str], *children: Node) -> PageElement:
    """Returns an element; empty attributes are left out, and so are empty texts."""
    shown: list[Node] = []
    for child in children:
        if isinstance(child, PageElement):
            shown.append(child)
        else:
            shown += [visible(child)] if tag in _TEXT_ONLY else marked(child)
    named = {name: visible(value) for name, value in attributes.items() if value}
    return PageElement(tag, named, tuple(shown))


def visible(text: str) -> str:
    """Returns the text with the names of invisible characters in their places."""
    return _UNSEEN.sub(lambda match: _label(match[0]), text)


def marked(text: str) -> list[Node]:
    """Returns the children that show a text: strings, and a mark for each invisible character."""
    parts: list[Node] = []
    start = 0
    for match in _UNSEEN.finditer(text):
        mark = PageElement("span", {"class": "mark", "title": _code(match[0])}, (_label(match[0]),))
        parts += [text[start : match.start()], mark]
        start = match.end()
    return [part for part in (*parts, text[start:]) if part]


def _label(character: str) -> str:
    # Unicode has pictures of the control characters of ASCII.
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else _code(character)


def _code(character: str) -> str:
    return f"U+{ord(character):04X}"


def html_of(*nodes: Node) -> str:
    return "".join(map(_html, nodes))


def _html(node: Node) -> str:
    if isinstance(node, str):
        return escape(node, quote=False)
    attributes = "".join(f' {name}="{escape(text)}"' for name, text in node.attributes.items())
    if node.tag in _DRAWN and not node.children:
        return f"<{node.tag}{attributes}/>"
    return f"<{node.tag}{attributes}>{html_of(*node.children)}</{node.tag}>"
