"""The losses that `trainer.loss` names. Each file is one, with its settings, function and paper; a
new file is a new loss, without an entry elsewhere. `base` is what a loss gets and what its settings
extend, `kinds` finds the losses. No file imports torch when it is imported: a configuration has the
settings of each loss.
"""
