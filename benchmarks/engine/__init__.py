"""The torch engine: NAME engine."""
