"""The commands that read a run: `top`, `report`, `query`, `tail`, `inspect`, `diff`, `weights` and
`checkpoints`. `listing` finds kept versions and checkpoints and formats them.
"""
