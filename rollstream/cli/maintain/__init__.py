"""The commands that check a run, copy it for bad times, feed other tools, and delete it."""
