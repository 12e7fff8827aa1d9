"""The figures of a run, and the columns of its views, by name: what each means, the same on every
page. `definitions` has the figures, `columns` those of `rollstream query`. Nothing here reads a
run.
"""
