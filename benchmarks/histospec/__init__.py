"""Drafts from history on the torch engine: NAME histospec."""
