"""Commands that maintain a run: `audit` and `health` check it, `backup` and `restore` copy it,
`forward` feeds other tools, `rm` deletes it, and `trust` permits code and hosts of another user's
run.
"""
