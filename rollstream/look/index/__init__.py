"""One index of a run, over its log and archive, for everybody who looks back. `run_index` holds
light columns in a DuckDB file, in `tables`; `index_reader` fills it, `figures` computes figures
from it. `parentage` is the run that this one began from, `audit_policy` has the settings that an
audit needs.
"""
