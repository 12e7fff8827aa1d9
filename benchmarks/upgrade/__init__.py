"""Two releases in one run: NAME skew."""
