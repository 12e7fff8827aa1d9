"""The commands that read a run: `ls`, `top`, `report`, `query`, `tail`, `inspect`, `config`,
`diff`, `weights` and `checkpoints`. `listing` finds kept versions and checkpoints and formats them.
"""
