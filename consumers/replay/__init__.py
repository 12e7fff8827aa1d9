"""Steps of a run trained again from its ledger, and its records published again elsewhere."""
