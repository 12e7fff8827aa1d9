"""What the trainer maximises: implementations of `Objective`
(`consumers/trainer/learn/objective.py`), the interface by which learners call them by name.

`surrogate` is the objective whose advantages follow from the rewards; `loss` combines a surrogate,
one of `losses/` or a user's, with importance ratios (`ratios`), masks against outliers (`masks`),
penalties and the KL to a reference (`kl_estimates`). `critic/` makes the advantages from values
that it learns; `policies/` scores tokens under reference and proximal policies. All modules but
those of `losses/` import torch.
"""
