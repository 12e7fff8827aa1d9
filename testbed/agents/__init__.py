"""Runs agents in the tests and benchmarks: programs, outside services, a rollout, a whole run."""
