"""Every parser of foreign text and bytes, with damaged inputs for it (`catalogue.py`): the property
tests of `tests/edges/fuzz` and the benchmark `edges_parsers` run the same list.
"""
