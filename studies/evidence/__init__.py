"""What asynchrony costs in learning, and what mends it: runs, their rows and the page of both."""
