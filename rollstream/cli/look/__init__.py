"""The commands that read a run: `ls`, `top`, `report`, `query`, `tail`, `inspect`, `config`,
`diff`, `weights` and `checkpoints`.
"""
