"""Supervised training of a new model on the documents of its task. `warmup` trains the model and
writes its folder, `process` runs that as a process of `rollstream run` with a progress bar.
"""
