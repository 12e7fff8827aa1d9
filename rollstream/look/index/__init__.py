"""One index of a run, over its log and archive, for everybody who looks back: report, explorer,
`rollstream tune`.

`run_index` holds a run's light columns in a DuckDB file, in `tables` that follow the rules of
`storage/archive/run_rules.py`; `index_reader` fills it, and `figures` computes from it the figures
that several places show. `parentage` is the run that this one began from,
`audit_policy` has the settings that an audit of the run needs.
"""
