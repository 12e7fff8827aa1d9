"""The model of a run in its store: what every role needs to start on a host that has none."""
