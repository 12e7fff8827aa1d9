"""Looking at runs, alive or ended, without changing them. `figures/` defines what is shown,
`index/` holds the light columns of one run, `query/` answers SQL and notebooks, `monitor/` is the
live view with its concerns, `report/` the page of one run, `explorer/` the browser's view of all.
"""
