"""`rollstream weights` and `rollstream checkpoints`: the kept versions and checkpoints of a run.

`listing` finds them and formats them as JSON objects and as tables.
"""
