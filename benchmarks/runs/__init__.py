"""Runs that several benchmarks start: of the quickstart, of many epochs, of the long tail; watched,
measured or killed.
"""
