"""Runs that several benchmarks start: of the quickstart, of many epochs, of the long tail;
observed, measured or killed.
"""
