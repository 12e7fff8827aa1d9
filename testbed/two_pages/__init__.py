"""Reads every figure that each place shows of one run, and pairs them by name: two numbers under
one name that differ are a fault, and so is a number that has no name.

`shown` is a number at a place and the comparison, `named_paths` names the numbers of JSON answers,
`named_words` those of printed lines and of tables, `places` reads all places of a finished run,
`pages` the explorer's pages in a browser.
"""
