"""Every measured promise: a folder for each NAME or family of names, listed in `catalogue`."""
