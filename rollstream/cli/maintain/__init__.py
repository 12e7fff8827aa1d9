"""The commands that keep a run well: `audit`, `health` and `forward`."""
