"""`rollstream fork` and `rollstream replay` (docs/reference/fork.md, docs/reference/replay.md); the
four kinds of replay are those of `rollstream.keep.replay`.
"""
