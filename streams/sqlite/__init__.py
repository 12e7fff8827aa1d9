"""The embedded bus's parts: one database file per topic, one for groups. `sqlite_bus.py` puts them
together.
"""
