"""Runs that are killed or meet hostile records: NAMEs chaos and hostile."""
