"""The objective with a critic: `gae` makes advantages of values, `objective` learns the values."""
