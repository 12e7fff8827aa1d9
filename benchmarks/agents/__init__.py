"""Benchmarks of agents: episodes of several turns, environments that let them wait, and programs
that reach the model over HTTP.
"""
