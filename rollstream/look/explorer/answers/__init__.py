"""The explorer's answers: each module returns the JSON objects of some routes from an `ExploredRun`
and the request's parameters (docs/reference/explorer-api.md).

`overview`, `sheet`, `questions`, `steps`, `groups`, `trajectory` (with its `chain` and
`token_scores`), `lanes`, `weights`, `maps`, `search`, `verdict`, `comparison` and `places` are
views; `rows` is what they share, `simulated` has the lanes of a simulated run, and `trace` writes
them for Perfetto.
"""
