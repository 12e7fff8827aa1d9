"""The explorer: `rollstream explore` serves a run to a browser, read-only."""
