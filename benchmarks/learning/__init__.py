"""What an update of the trainer computes: NAME learning."""
