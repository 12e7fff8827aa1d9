"""Commands that ask the log and the archive: query, tail, inspect."""

from rollstream.grammar.parts import Commands


def add_asking(commands: Commands) -> None:
    """`query` and its neighbours."""
