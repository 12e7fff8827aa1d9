"""Dialogues with a task's environment, which replies to turns of the model (`dialogue`)."""
