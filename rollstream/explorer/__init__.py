"""The explorer: `rollstream explore` serves runs to a browser, read-only.

`explored_run` opens a run: its index (`rollstream/index/`), and a `record_reader` for single
records. `answers` has one module per view; `filters` selects trajectories. `routes` maps paths to
answers, for the `server` (with `address`, `security`, `events` and the page's `assets`) and for the
static `export`. `sql` answers free queries, which `sql_process` runs, `trace` writes a trace for
Perfetto, and `process` runs the explorer beside a run. `simulation` makes the runs of a
simulation's configuration, and `simulated` states where one is.
"""
