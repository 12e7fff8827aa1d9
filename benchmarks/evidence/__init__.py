"""What asynchrony costs in learning, and what mends it: NAME evidence."""
