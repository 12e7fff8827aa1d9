"""The losses that `trainer.loss` names: each file is one, with its own settings, its function and
its paper. A new file is a new loss, without an entry elsewhere.

`base` is what a loss gets (`SurrogateInputs`) and what its settings extend (`LossSettings`),
`kinds` finds the losses in this folder. No file here imports torch when it is imported: a
configuration has the settings of each loss.
"""
