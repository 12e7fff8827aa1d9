"""From a trained step to a rollout that serves it: NAMEs weights, delta and relay."""
