"""What the trainer maximises: implementations of `Objective`
(`consumers/trainer/learn/objective.py`), the interface by which learners call them by name.

`surrogate` is the objective whose advantages follow from the rewards; `loss` combines a surrogate
with masks and penalties. `critic/` makes the advantages from values that it learns; `policies/`
scores tokens under reference and proximal policies. All modules import torch.
"""
