"""Whether two places that show one figure of a run show one number.

`runs` makes short runs of six kinds, one of them killed, and scrapes them while they live;
`two_pages` reads every place of each and counts what differs.
"""
