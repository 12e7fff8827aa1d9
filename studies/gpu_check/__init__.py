"""`make gpu-check`: measures a run on one GPU."""
