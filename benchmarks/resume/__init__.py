"""What a kill costs and what the durable log costs: NAME resume."""
