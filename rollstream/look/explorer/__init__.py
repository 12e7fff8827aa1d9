"""The explorer: `rollstream explore` serves runs to a browser, read-only.

`explored_run` opens a run: its index (`rollstream/look/index/`), and a `record_reader` for single
records. `answers/` has one module per view; `filters` selects trajectories. `serving/` is what a
browser asks, with the page's `assets`, or a `page_file` with some answers inside. `simulation`
makes the runs of a simulation's configuration, and `simulated` states where one is.
"""
