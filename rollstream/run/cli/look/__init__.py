"""The commands that read a run: `ls`, `top`, `report`, `query`, `explore`, `trace`, `tail`,
`inspect`, `config`, `diff`, `weights` and `checkpoints`. `episode_tree` shows an episode of an
agent for `inspect`.
"""
