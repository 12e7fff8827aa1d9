"""The measured promises of the project: one folder for each NAME or family of names, listed in
`catalogue`.
"""
