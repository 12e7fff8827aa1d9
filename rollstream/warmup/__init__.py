"""The warm-up: supervised training of a new model on the documents of its task.

`warmup` writes the model's folder, `sft` is the training loop, `process` runs the warm-up as a
process of `rollstream run` with a progress bar.
"""
