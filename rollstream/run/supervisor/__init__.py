"""Starts a run's processes and keeps them alive. `plan` derives the processes from the
configuration, `process` is one of them and the policy of its restarts, `supervisor` watches them
all, one per run's folder. `cards` assigns GPUs, `train_group` starts the trainer's ranks on this
machine.
"""
