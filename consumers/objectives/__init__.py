"""What the trainer maximises: implementations of `Objective`
(`consumers/trainer/learn/objective.py`).

`surrogate` has advantages that follow from the rewards; `loss` combines one of `losses/` or a
user's with importance `ratios`, `masks` against outliers, penalties and the KL to a reference
(`kl_estimates`). `critic/` makes advantages from values that it learns; `policies/` scores tokens
under reference and proximal policies. Only `losses/` does not import torch.
"""
