"""The plot of docs/explanation/drafts.md: acceptance and tokens per step over the passes of a run,
as its report draws them.

`python -m benchmarks.histospec.plot runs/epochs docs/explanation/drafts.svg`

One file serves light and dark pages; the same run gives the same bytes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from rollstream.look.report.chart import HEIGHT, WIDTH, Chart, draw_chart
from rollstream.look.report.elements import html_of
from rollstream.look.report.sheet import draft_charts
from rollstream.look.report.summary import open_history
from rollstream.run.config.run_folder import run_folder

HEAD = 42  # above each plot, for its title
STYLE = """
:root{--ink:#1b1c1e;--soft:#62656b;--rule:#e4e4e0;--page:#fff;--c1:#2a6fd1;--c2:#d9622b;
--c3:#1c8f78;--c4:#8a55c8;--c5:#b8860b;--c6:#c2408f;--c7:#5a6f85;--c8:#3c7a1e}
@media (prefers-color-scheme:dark){:root{--ink:#eceded;--soft:#a0a4ab;--rule:#32363c;--page:#16181b;
--c1:#5b9bf0;--c2:#f0854f;--c3:#3fbf9f;--c4:#b48bea;--c5:#d9ad3c;--c6:#ee7fc0;--c7:#9db2c8;
--c8:#86c766}}
svg{font:12px system-ui,-apple-system,"Segoe UI","Noto Sans",sans-serif}
.page{fill:var(--page)}.title{font-size:15px;font-weight:600;fill:var(--ink)}
.tick,.note{fill:var(--soft)}.value{fill:var(--ink);font-weight:600}
.key{fill:var(--c)}.grid{stroke:var(--rule)}.line{fill:none;stroke:var(--c);stroke-width:2}.area{fill:var(--c)}
.mid{text-anchor:middle}.end{text-anchor:end}
""" + "".join(f".c{n}{{--c:var(--c{n})}}" for n in range(1, 9))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.histospec.plot",
        description="Draw what drafting came to over the passes of a run.",
        epilog="example: python -m benchmarks.histospec.plot runs/epochs "
        "docs/explanation/drafts.svg",
    )
    parser.add_argument("run", help="its folder")
    parser.add_argument("file", type=Path, help="the SVG to write")
    chosen = parser.parse_args(arguments)
    charts = draft_charts(open_history(run_folder(chosen.run)).drafts)
    if not charts:
        parser.error(f"{chosen.run} has no drafts, or went over its prompts only once")
    chosen.file.write_text(picture(charts), encoding="utf-8")


def picture(charts: Sequence[Chart]) -> str:
    """Returns the plots, one below the other."""
    height = (HEAD + HEIGHT) * len(charts)
    parts: list[str] = []
    for index, chart in enumerate(charts):
        top = index * (HEAD + HEIGHT)
        drawn = html_of(draw_chart(chart)).replace(
            "<svg ", f'<svg y="{top + HEAD:g}" width="{WIDTH:g}" height="{HEIGHT:g}" ', 1
        )
        names = ", ".join(
            f'<tspan class="key c{series.colour}">{escape(series.name)}</tspan>'
            for series in chart.series
            if series.name
        )
        parts.append(f'<text class="title" x="8" y="{top + 18:g}">{escape(chart.title)}</text>')
        note = f"{names}: {escape(chart.note)}"
        parts.append(f'<text class="note" x="8" y="{top + 34:g}">{note}</text>{drawn}')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" '
        f'width="{WIDTH:g}" height="{height:g}"><style>{STYLE}</style>'
        f'<rect class="page" width="100%" height="100%"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    main()
