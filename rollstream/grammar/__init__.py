"""The grammar of the command line; nothing here imports what a command needs."""
