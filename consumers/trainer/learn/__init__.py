"""Learners: from samples to updated weights, without log or store.

`base` is the interface (`Learner`) and its factory. `learner` trains a model in this process: on
the threads and memory of `workers`, over the fp32 `masters` with AdamW, whose moments `low_bit` has
in 8 bits. A micro-batch is laid out by `row_layout` and scored by `forward`: through `llama` (with
`fused_ops`) or transformers' own forward, and the float32 head of `scores`. `objective` is the
interface of what makes the loss (`consumers/objectives/`), with the `statistics` of its tokens;
`surrogate_check` tries a user's own loss. `mismatch` compares engine and trainer, `paced` is a
learner that only models time.

All modules import torch.
"""
