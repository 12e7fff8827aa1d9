"""Reports of runs: the sheet of a run, which `report.html` and the explorer's overview show, the
sheet of several runs, a comparison, a summary.

`summary` reads a run's `history` from its index and metrics files and derives the most important
metrics, `untrained` compares failed and dropped trajectories with trained ones, `learning` fits
reward curves and shows what was trained, `comparison` derives the metrics that two runs share.
`sheet` lays out the parts of a run's sheet: `cards` of `elements`, each `chart` and the `timeline`
drawn as SVG. `comparison` also has the sheet of several runs, `timeline` that of a simulation.
`serve` waits for the end of a run and serves its page. The explorer writes the page.
"""
