"""HTML parts of the report: a self-contained page for light and dark mode, without scripts."""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rollstream.report.charts import Chart, draw_chart

STYLE = """
:root { color-scheme: light dark;
  --page:#f7f7f5; --card:#fff; --ink:#1b1c1e; --soft:#62656b; --rule:#e4e4e0; --track:#f0f0ec;
  --c1:#2a6fd1; --c2:#d9622b; --c3:#1c8f78; --c4:#8a55c8;
  --c5:#b8860b; --c6:#c2408f; --c7:#5a6f85; --c8:#3c7a1e;
  --bad:#c4342d; --edge:#fff;
  --v0:#cfe1f8; --v1:#b5d2f4; --v2:#9ac2ef; --v3:#7fb1ea; --v4:#639fe4; --v5:#488cdb;
  --v6:#3079cd; --v7:#2267b5; --v8:#175598; --v9:#0e437b; }
@media (prefers-color-scheme: dark) { :root {
  --page:#16181b; --card:#1e2125; --ink:#eceded; --soft:#a0a4ab; --rule:#32363c; --track:#282c31;
  --c1:#5b9bf0; --c2:#f0854f; --c3:#3fbf9f; --c4:#b48bea;
  --c5:#d9ad3c; --c6:#ee7fc0; --c7:#9db2c8; --c8:#86c766;
  --bad:#ff7a70; --edge:#1e2125;
  --v0:#1d3a5c; --v1:#214a78; --v2:#265b94; --v3:#2d6cb0; --v4:#387fca; --v5:#4c92de;
  --v6:#68a6ea; --v7:#87baf1; --v8:#a8cff7; --v9:#cbe3fc; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
main { max-width:1220px; margin:0 auto; padding:32px 20px 64px; }
h1 { font-size:26px; font-weight:650; letter-spacing:-.01em; margin:0; }
h2 { font-size:15px; font-weight:620; margin:0; }
p.soft, .note { color:var(--soft); margin:2px 0 0; }
.note { font-size:13px; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(168px,1fr)); gap:12px;
  margin:24px 0 12px; }
.tile, .card { background:var(--card); border:1px solid var(--rule); border-radius:10px; }
.tile { padding:12px 16px; }
.tile b { display:block; font-size:23px; font-weight:620; letter-spacing:-.01em; }
.tile span { color:var(--soft); font-size:13px; }
.charts { display:grid; grid-template-columns:repeat(auto-fill,minmax(min(480px,100%),1fr));
  gap:12px; margin:12px 0; }
.card { padding:16px 18px 10px; min-width:0; }
.card.wide { margin:12px 0; overflow-x:auto; }
.card.wide svg { min-width:760px; }
svg { display:block; width:100%; height:auto; margin-top:6px; overflow:visible;
  font:12px system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
.legend { display:flex; flex-wrap:wrap; gap:2px 16px; margin-top:4px; font-size:13px;
  color:var(--soft); }
.legend i { display:inline-block; width:14px; height:3px; border-radius:2px; margin-right:6px;
  vertical-align:middle; background:var(--c); }
.legend i.thin { height:0; background:none; border-top:2px dotted var(--c); }
.grid { stroke:var(--rule); stroke-width:1; }
.tick { fill:var(--soft); font-size:12px; font-variant-numeric:tabular-nums; }
.value, .label { fill:var(--ink); font-size:12.5px; font-variant-numeric:tabular-nums; }
.value { font-weight:600; } .mid { text-anchor:middle; } .end { text-anchor:end; }
.line { fill:none; stroke:var(--c); stroke-width:2; stroke-linejoin:round; stroke-linecap:round; }
.line.thin { stroke-width:1.5; stroke-dasharray:1 4; }
.area { fill:color-mix(in srgb, var(--c) 85%, var(--card)); stroke:var(--edge); stroke-width:2; }
.dot { fill:var(--c); opacity:0; } .dot:hover, .dot.alone { opacity:1; }
.c1 { --c:var(--c1); } .c2 { --c:var(--c2); } .c3 { --c:var(--c3); } .c4 { --c:var(--c4); }
.c5 { --c:var(--c5); } .c6 { --c:var(--c6); } .c7 { --c:var(--c7); } .c8 { --c:var(--c8); }
.track { fill:var(--track); }
.pull { stroke:var(--c3); stroke-width:2; fill:none; }
.move { fill:var(--c2); } .move .shaft { fill:none; stroke:var(--c2); stroke-width:1.6; }
.death { stroke:var(--bad); stroke-width:2.5; fill:none; stroke-linecap:round; }
.v0{fill:var(--v0)} .v1{fill:var(--v1)} .v2{fill:var(--v2)} .v3{fill:var(--v3)} .v4{fill:var(--v4)}
.v5{fill:var(--v5)} .v6{fill:var(--v6)} .v7{fill:var(--v7)} .v8{fill:var(--v8)} .v9{fill:var(--v9)}
table { border-collapse:collapse; min-width:min(100%,420px); margin:8px 0 6px; font-size:14px; }
th { color:var(--soft); font-weight:500; text-align:left; }
th, td { padding:4px 14px 4px 0; border-bottom:1px solid var(--rule); vertical-align:top;
  overflow-wrap:anywhere; }
tr:last-child td { border-bottom:0; }
td.n, th.n { text-align:right; font-variant-numeric:tabular-nums; }
summary { cursor:pointer; font-weight:620; padding-bottom:6px; }
"""


def page(title: str, body: Sequence[str]) -> str:
    """Returns the whole HTML document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{chr(10).join(body)}\n</main></body></html>\n"
    )


def write_page(text: str, path: Path) -> None:
    """Write the page under a temporary name and rename it, so readers never see a part."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def heading(title: str, line: str) -> str:
    return f'<h1>{escape(title)}</h1><p class="soft">{escape(line)}</p>'


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """Returns tiles of (name, value), with the value in large type."""
    cells = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in figures
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def charts(drawn: Sequence[Chart]) -> str:
    """Returns a grid of the charts that have points."""
    cards = (_chart_card(chart) for chart in drawn if not chart.is_empty())
    return f'<div class="charts">{"".join(cards)}</div>'


def wide(title: str, note: str, content: str) -> str:
    """Returns a card over the whole width."""
    return (
        f'<section class="card wide"><h2>{escape(title)}</h2>'
        f'<p class="note">{escape(note)}</p>{content}</section>'
    )


def folded(title: str, content: str) -> str:
    """Returns a card that opens on a click."""
    return (
        f'<section class="card wide"><details><summary>{escape(title)}</summary>'
        f"{content}</details></section>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str | int]]) -> str:
    """Returns a table; columns of integers are right-aligned."""
    numeric = [all(isinstance(row[i], int) for row in rows) for i in range(len(head))]

    def cells(tag: str, values: Sequence[str | int]) -> str:
        return "".join(
            f"<{tag}{' class=n' if right else ''}>{escape(_shown(value))}</{tag}>"
            for value, right in zip(values, numeric, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', head)}</tr>{body}</table>"


def _shown(value: str | int) -> str:
    return (
        f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}") if isinstance(value, int) else value
    )


def _chart_card(chart: Chart) -> str:
    legend = ""
    if len(chart.series) > 1:
        items = (
            f'<span class="c{one.colour}"><i{" class=thin" if one.thin else ""}></i>'
            f"{escape(one.name)}</span>"
            for one in chart.series
            if one.points
        )
        legend = f'<div class="legend">{"".join(items)}</div>'
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    title, drawn = escape(chart.title), draw_chart(chart)
    return f'<section class="card"><h2>{title}</h2>{note}{legend}{drawn}</section>'
