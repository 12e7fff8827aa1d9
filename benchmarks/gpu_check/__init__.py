"""`make gpu-check`: what one GPU does."""
