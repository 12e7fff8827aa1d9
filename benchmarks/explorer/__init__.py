"""Measurements of the explorer (docs/how-to/explore-a-run.md)."""
