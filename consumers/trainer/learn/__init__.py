"""Learners: from samples to updated weights, without log or store. All modules import torch.

`base` is the interface. `learner` trains a model in this process, on `workers`, over the fp32
`masters` (moments in 8 bits: `low_bit`). A micro-batch is laid out by `row_layout` and scored by
`forward`: through `llama` (with `fused_ops`) or transformers' own, and the float32 head of
`scores`. `objective` is the interface of the loss (`consumers/objectives/`), with `statistics`;
`surrogate_check` tries a user's loss. `mismatch` compares engine and trainer, `paced` only models
time.
"""
