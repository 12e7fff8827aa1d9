"""The simulator against published and against real runs: NAME simulator."""
