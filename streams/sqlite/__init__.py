"""The parts of the embedded bus: one database file per topic, one for consumer groups.
`sqlite_bus.py` combines them.
"""
