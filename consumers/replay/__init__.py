"""Trains recorded steps of a run again from its ledger, and copies its records to another bus."""
