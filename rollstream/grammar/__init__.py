"""The argument parsers of all commands; nothing here imports the commands' own modules."""
