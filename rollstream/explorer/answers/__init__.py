"""One module per view of the explorer: each returns the JSON object of a route from an
`ExploredRun` and the request's parameters (docs/reference/explorer-api.md).
"""
