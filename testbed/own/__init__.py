"""Runs of every kind (`kinds`), and what a backup and a removal lack of them (`compared`)."""
