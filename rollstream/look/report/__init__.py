"""Reports of runs: one HTML page per run, a page for several runs, a comparison, a summary.

`summary` reads a run's `history` from its index and metrics files and derives the most important
metrics, `untrained` compares failed and dropped trajectories with trained ones, `learning` fits
reward curves and shows what was trained, `comparison` derives the metrics that two runs share.
`page` holds the HTML parts and draws charts, `timeline` draws the rollouts, `write` lays out the
sections of a report.
`comparison` also writes the page of several runs, `timeline` that of a simulation.
`serve` waits for the end of a run and serves its page.
"""
