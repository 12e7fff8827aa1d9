"""The cost of a kill and of the durable log: NAME resume."""
