"""NAME edges: what a run of somebody else, and text from agents, may do.

`edges` chains the cases: `files` runs every looking command on hostile runs, `deaths` sends odd
text to a living run, `own` compares backups and removals with what runs wrote, and `memory`
measures hostile queries.
"""
