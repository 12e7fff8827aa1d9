"""The figures of a run, and the columns of its views, by name: what each means, the same on every
page.

`definitions` has the figures that report, explorer, live view and metrics show, `columns` those of
`rollstream query`, each with the release since which it is stable. Nothing here reads a run.
"""
