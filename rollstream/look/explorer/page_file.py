"""Writes pages that need no server: the parts that the program laid out and drew, which are read
and printed without a script, and the explorer's page around them, with its scripts and answers
inside.

Nothing of a run can become a script: its texts are escaped, its answers are packed, and the page's
policy allows no script but ours and no request at all.
"""

import base64
import gzip
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path

import msgspec

from rollstream.look.explorer.assets import PAGE
from rollstream.look.report.cards import FULL_DETAIL, Detail
from rollstream.look.report.elements import PageElement, html_of, visible
from rollstream.whole_file import output_file

# Bytes of a page; the sheet of a longer run is thinned, and answers are left out.
PAGE_BYTES = 500_000
# Times that the detail is halved.
THINNINGS = 4
# What the page has no use for without a server.
LEFT_OUT = ("static.js", "vendor/parquet.js", "inlined.js", "lanes/", "views/lanes.js",
            "views/sql.js", "views/trajectory.js", "scales.js")  # fmt: skip

Sheet = Callable[[Detail], Sequence[PageElement]]
Answers = Iterable[tuple[str, bytes]]
"""Keys and bodies of answers, the most important first."""


def write_page(
    title: str, sheet: Sheet, path: Path, is_typed: bool = False, answers: Answers = ()
) -> None:
    """Write the page so that readers never see a part of it (`output_file`). With `is_typed` the
    user typed the path, so links are followed.
    """
    with output_file(path, is_typed) as partial:
        partial.write_text(page_html(title, sheet, answers), encoding="utf-8")


def page_html(title: str, sheet: Sheet, answers: Answers = ()) -> str:
    """Returns the page, of at most about `PAGE_BYTES`."""
    frame = len(_document(title, "", _packed({})).encode())
    detail = FULL_DETAIL
    body = html_of(*sheet(detail))
    for _ in range(THINNINGS):
        if frame + len(body.encode()) <= PAGE_BYTES:
            break
        detail = detail.half()
        body = html_of(*sheet(detail))
    return _document(
        title, body, _packed(_fitting(answers, PAGE_BYTES - frame - len(body.encode())))
    )


def _fitting(answers: Answers, room: int) -> dict[str, msgspec.Raw]:
    chosen: dict[str, msgspec.Raw] = {}
    for key, body in answers:
        # Packed together they take less.
        room -= len(gzip.compress(body)) * 4 // 3
        if room < 0:
            break
        chosen[key] = msgspec.Raw(body)
    return chosen


def _packed(answers: dict[str, msgspec.Raw]) -> str:
    paths = {path.relative_to(PAGE).as_posix(): path for path in sorted(PAGE.rglob("*.js"))}
    modules = {
        name: path.read_text("utf-8")
        for name, path in paths.items()
        if not name.startswith(LEFT_OUT)
    }
    data = msgspec.json.encode({"modules": modules, "answers": answers})
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def _document(title: str, body: str, packed: str) -> str:
    style = (PAGE / "styles.css").read_text("utf-8")
    script = (PAGE / "inlined.js").read_text("utf-8")
    icon = base64.b64encode((PAGE / "favicon.svg").read_bytes()).decode()
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; img-src data:; "
        f"script-src '{_hash(script)}' blob:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="rollstream-source" content="report">\n'
        f"<title>{escape(visible(title))}</title>\n"
        f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">\n'
        f"<style>{style}</style>\n</head>\n"
        f'<body>\n<div id="app" class="alone"><main>{body}</main></div>\n'
        f'<script type="text/plain" id="packed">{packed}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"
