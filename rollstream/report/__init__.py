"""Reports of runs: one HTML page per run, a page for several runs, a comparison, a summary.

`reading` folds log and metrics files into a `history`. `summary`, `comparison` and `drafts` derive
metrics from it. `charts` and `timeline` draw SVG, `page` holds the HTML parts, `write` the sections
of a report. `comparison` also writes the page of several runs, `timeline` that of a simulation.
"""
